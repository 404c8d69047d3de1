"""AdamW in which groups choose another method of updating their parameters."""

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from parallel.torch_internals import active_dispatch_modes
from zero.core.step.atoms import ELEMENT, Atom
from zero.updates.cautious_adamw import CautiousAdamW


class GroupedAdamW(CautiousAdamW):
    """AdamW for groups with update="adamw", and another method for those with update=`method`, which is the default.

    It has the settings of AdamW and of the method.
    """

    method: ClassVar[str]
    own_defaults: ClassVar[dict[str, Any]]
    """The settings of the method, with their defaults."""
    own_choices: ClassVar[dict[str, Collection[Any]]] = {}
    """The values that some of them may have."""
    common: ClassVar[frozenset[str]] = frozenset()
    """Those that are the same in all groups of the method."""
    own_atom: ClassVar[Atom]
    """The atom of the method."""

    def __init__(self, params: Any, **settings: Any):
        own = {name: settings.pop(name, value) for name, value in self.own_defaults.items()}
        super().__init__(params, **settings)
        self._flags: dict[tuple[Any, ...], Tensor] = {}
        self.defaults |= {"update": self.method, **own}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._check_choices(group)
        for name in sorted(self.common):
            self.defaults[name] = self._common_value(name)

    def _check_choices(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a group has a value that its update does not know."""
        choices: dict[str, Collection[Any]] = {"update": (self.method, "adamw")}
        if group["update"] == self.method:
            choices |= {"maximize": (False,), "amsgrad": (False,), **self.own_choices}
        for name, values in choices.items():
            if group[name] not in values:
                known = " or ".join(map(repr, values))
                raise ValueError(f"{type(self).__name__} has {name}={group[name]!r} in a group; choose {known}")

    def _common_value(self, name: str) -> Any:
        """Return the value that a setting has in all groups of the method. Raises ValueError if they differ."""
        values = [group[name] for group in self.param_groups if group["update"] == self.method]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} is {values} in groups of {self.method!r}; give all of them the same value")
        return values[0] if values else self.defaults[name]

    def state_dict(self) -> NoReturn:
        """Raise RuntimeError: torch's state dict would lose states of matrices, and change the type of others."""
        raise RuntimeError(
            f"a state dict of torch does not keep the states of {type(self).__name__}; pass this class to "
            "ZeroOptimizer, and use `save` and `load` of zero"
        )

    def atom(self, group: dict[str, Any]) -> Atom:
        """Return the atom of a group."""
        return self.own_atom if group["update"] == self.method else ELEMENT

    def start_round(self, group: dict[str, Any]) -> None:
        """Begin a step of all parameters of a group, in which it is the first call."""

    def end_round(self) -> None:
        """End a step: forget its flags."""
        self._flags.clear()

    @abstractmethod
    def update_param(self, param: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter of a group by the method."""

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
            self._flags[key] = self.kept(value, dtype, otherwise)
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

    def update_groups(self) -> None:
        """Update all parameters whose gradients are known."""
        groups = self.param_groups
        own = [group for group in groups if group["update"] == self.method and group["params"]]
        for group in own:
            self.start_round(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.update_param(param, param.grad, group)
        self.param_groups = [group for group in groups if group["update"] != self.method]
        try:
            super().update_groups()
        finally:
            self.param_groups = groups
            if own:  # else this is a part of a step, whose matrices are updated elsewhere
                self.end_round()
