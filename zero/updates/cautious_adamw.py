"""AdamW with cautious weight decay (Chen et al., 2025), which skips a step by a flag on the device."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from zero.updates.skippable import kept

ADAM_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


class CautiousAdamW(AdamW):
    """Torch's AdamW, with the setting `cautious_decay`: decay only elements that the update brings nearer to zero.

    Those are the elements whose product with their update is not negative. An update has the sign of the first moment,
    so an element decays, if at all, before torch's kernel updates it. The fused AdamW, which is the default, lets a
    step be skipped without a wait: see `ZeroOptimizer`.
    """

    def __init__(self, params: Any, *, cautious_decay: bool = False, **settings: Any):
        super().__init__(params, **ADAM_DEFAULTS | settings)
        self._step_supports_amp_scaling = False  # only torch's kernel divides by the scale of a GradScaler
        self.defaults["cautious_decay"] = cautious_decay
        for group in self.param_groups:
            group.setdefault("cautious_decay", cautious_decay)

    def kept(self, value: float, dtype: torch.dtype, otherwise: float = 0.0) -> Any:
        """Return `value`, or `otherwise` if the step is to be skipped; a number if no flag has been set."""
        if (found_inf := getattr(self, "found_inf", None)) is None:
            return value
        return kept(found_inf, value, dtype, otherwise)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters, for the gradients that a closure computes if there is one; return its result."""
        with torch.enable_grad():
            loss = closure() if closure else None
        cautious = [group for group in self.param_groups if group["cautious_decay"] and group["weight_decay"]]
        decays = [group["weight_decay"] for group in cautious]
        for group in cautious:
            for param in (param for param in group["params"] if param.grad is not None):
                grad = -param.grad if group["maximize"] else param.grad
                before = self.state[param].get("exp_avg")
                first = grad if before is None else before.lerp(grad, 1 - group["betas"][0])
                decay_cautiously(param, first, self.kept(1 - group["lr"] * group["weight_decay"], param.dtype, 1.0))
            group["weight_decay"] = 0.0
        try:
            super().step()
        finally:
            for group, decay in zip(cautious, decays, strict=True):
                group["weight_decay"] = decay
        return loss


def decay_cautiously(param: Tensor, update: Tensor, factor: Tensor | float) -> None:
    """Multiply the elements by `factor` that become nearer to zero when the update is subtracted."""
    factors = (update * param).ge_(0).mul_(factor - 1).add_(1)  # of NaN, in a step that is skipped, it is 1
    param.mul_(factors)
