"""The base class of zero's own optimizers, which skip a step by a flag on the device."""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.torch_internals import active_dispatch_modes


class SkippableOptimizer(Optimizer):
    """An optimizer that skips a step if `found_inf`, a tensor on the device, is not zero: the host does not wait.

    It has the settings `lr`, `weight_decay` and `cautious_decay` beside those of its class.
    """

    own_defaults: ClassVar[dict[str, Any]]
    """The settings of the class, with their defaults."""
    own_choices: ClassVar[dict[str, Collection[Any]]] = {}
    """The values that some of them may have."""
    common: ClassVar[frozenset[str]] = frozenset()
    """Those that are the same in all groups."""
    own_counters: ClassVar[tuple[str, ...]] = ()
    """The names of what it counts in each group."""
    skips_by_flag = True

    def __init__(self, params: Any, **settings: Any):
        defaults = {"lr": 1e-3, "weight_decay": 0.1, "cautious_decay": False, **self.own_defaults}
        for name in settings.keys() - defaults.keys():
            raise ValueError(f"{type(self).__name__} has no setting {name}; choose from {', '.join(defaults)}")
        super().__init__(params, defaults | settings)
        self._flags: dict[tuple[Any, ...], Tensor] = {}
        for group in self.param_groups:
            self._check(group)
        for name in sorted(self.common):
            self.defaults[name] = self._common_value(name)

    def _check(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a group has a value that it cannot have."""
        kind = type(self).__name__
        if "update" in group:
            raise ValueError(
                f'update="{group["update"]}" in a group; give two optimizers: ZeroOptimizer(model, '
                f"[{kind}(matrices, ...), CautiousAdamW(rest, ...)])"
            )
        for name in ("maximize", "amsgrad"):
            if group.get(name):
                raise ValueError(f"{kind} has {name}=True in a group; choose False")
        for name, values in self.own_choices.items():
            if group[name] not in values:
                known = " or ".join(map(repr, values))
                raise ValueError(f"{kind} has {name}={group[name]!r} in a group; choose {known}")
        for name in ("lr", "weight_decay", "eps"):
            if name in group and not group[name] >= 0:
                raise ValueError(f"{kind} has {name}={group[name]} in a group, which is below 0; choose 0 or more")
        if not all(0 <= beta < 1 for beta in group.get("betas", ())):
            raise ValueError(f"{kind} has betas={group['betas']} in a group; choose numbers from 0 to below 1")

    def _common_value(self, name: str) -> Any:
        """Return the value that a setting has in all groups. Raises ValueError if they differ."""
        values = [group[name] for group in self.param_groups]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} is {values} in groups of {type(self).__name__}; give all of them the same value")
        return values[0]

    def state_dict(self) -> NoReturn:
        """Raise RuntimeError: torch's state dict would lose states of matrices, and change the type of others."""
        raise RuntimeError(
            f"a state dict of torch does not keep the states of {type(self).__name__}; give it to a ZeroOptimizer, and "
            "use `save` and `load` of zero"
        )

    def begin_step(self, group: dict[str, Any]) -> None:
        """Begin a step of all parameters of a group, in which it is the first call."""

    def end_step(self) -> None:
        """End a step: forget its flags."""
        self._flags.clear()

    @abstractmethod
    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter of a group."""

    def is_kept(self, like: Tensor) -> Tensor | None:
        """Return 0 if the step is to be skipped, else 1, in the type of `like`; None if no flag has been set."""
        return None if getattr(self, "found_inf", None) is None else self.if_kept(1.0, like.dtype)

    def if_kept(self, value: float, dtype: torch.dtype, otherwise: float = 0.0) -> Any:
        """Return `value`, or `otherwise` if the step is to be skipped: a tensor, and a number if no flag has been set.

        The tensors are kept until the step ends, which spares two kernels for each stretch of a parameter.
        """
        if (found_inf := getattr(self, "found_inf", None)) is None:
            return value
        key = found_inf.device, value, dtype, otherwise
        if key not in self._flags:
            self._flags[key] = kept(found_inf, value, dtype, otherwise)
        return self._flags[key]

    def skip_flag(self) -> Tensor | None:
        """Return whether the step is to be skipped; None if no flag has been set.

        Also None if the flag is on a CPU, where the host reads it at once, and is 0: this spares the kernels that
        clear gradients.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or (found_inf.device.type == "cpu" and not active_dispatch_modes() and not found_inf):
            return None
        return self.if_kept(False, torch.bool, True)

    def clear_if_skipped(self, grad: Tensor) -> None:
        """Let a gradient be zeros if the step is to be skipped: times a weight of zero, inf would be NaN."""
        if (skip := self.skip_flag()) is not None:
            grad.masked_fill_(skip, 0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters, for the gradients that a closure computes if there is one; return its result."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            if group["params"]:
                self.begin_step(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.update_param(param, param.grad, group)
        self.end_step()
        return loss


def kept(found_inf: Tensor, value: float, dtype: torch.dtype, otherwise: float) -> Tensor:
    """Return `value`, or `otherwise` if the flag is not zero, 0-dim on its device."""
    return found_inf.new_full((), otherwise, dtype=dtype).masked_fill_(found_inf == 0, value)
