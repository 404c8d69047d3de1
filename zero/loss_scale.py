"""The loss scale that prevents underflow of fp16 gradients. It consists of tensors, so no update blocks the host."""

import torch
from torch import Tensor


class LossScale:
    """A factor by which the loss is multiplied before backward, static or dynamic.

    Multiply the loss by `scale`, and call `update` after each step. A dynamic scale is halved after `hysteresis`
    consecutive steps with overflow, and again after each overflow that follows directly, but not below `minimum`. It is
    doubled after `growth_interval` consecutive steps without overflow. A static scale never changes.
    """

    def __init__(
        self,
        initial: float = 1.0,
        *,
        is_dynamic: bool = False,
        minimum: float = 1.0,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        device: torch.device | str = "cpu",
    ):
        self.is_dynamic, self._minimum = is_dynamic, minimum
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self.scale = torch.tensor(float(initial), device=device)
        # Consecutive steps without overflow, and with overflow, up to now.
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self._num_overflowed = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Update a dynamic scale after a step.

        `found_inf` is 0-dim and the same on all ranks: 1 if a gradient was not finite, else 0.
        """
        if not self.is_dynamic:
            return
        overflowed = found_inf.bool()
        self._num_overflowed.add_(1).mul_(overflowed)
        self._num_good.add_(1).mul_(~overflowed)
        # At most one of these is true, since one of the two counts is zero.
        must_halve = self._num_overflowed >= self._hysteresis
        must_double = self._num_good >= self._growth_interval
        self.scale.mul_(1.0 - 0.5 * must_halve.float() + must_double.float()).clamp_(min=self._minimum)
        self._num_good.mul_(~must_double)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, not copies: save them, or copy saved values into them."""
        return {"scale": self.scale, "num_good": self._num_good, "num_overflowed": self._num_overflowed}
