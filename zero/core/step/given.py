"""Torch optimizers as a `ZeroOptimizer` is given them: instances, or a class with groups and settings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.validation.errors import ConfigError
from zero.core.partition.layout import cut
from zero.core.step.parameter_groups import Groups, as_groups
from zero.core.step.pieces import Piece

PLAIN = (bool, int, float, str, tuple, type(None))
PiecesOf = Mapping[Any, Sequence[Piece]]  # by parameter of the model
OptimizerClass = Callable[..., Optimizer]
Optimizers = OptimizerClass | Optimizer | list[Optimizer] | tuple[Optimizer, ...]


@dataclass(frozen=True)
class Given:
    """One torch optimizer of parameters of the model."""

    optimizer_class: OptimizerClass
    settings: Mapping[str, Any]
    groups: Groups
    numbers: Sequence[int]
    """The numbers of the groups among those of all optimizers."""
    instance: Optimizer | None = None

    def make(self, params: Any, **settings: Any) -> Optimizer:
        """Return another optimizer of this class, with the numbers and texts that are attributes of the instance."""
        made = self.optimizer_class(params, **settings)
        if self.instance is not None:
            of_all = vars(Optimizer([nn.Parameter(torch.empty(0))], {}))
            own = {name: value for name, value in vars(self.instance).items() if name not in of_all}
            vars(made).update({name: value for name, value in own.items() if isinstance(value, PLAIN)})
        return made

    def of_pieces(self, groups: Groups, pieces: PiecesOf) -> Optimizer:
        """Return the optimizer of the owned `pieces` of parameters, which `groups` have in place of them.

        An instance is changed, and its states, which have been checked, become those of the pieces.
        """
        if self.instance is None:
            return self.optimizer_class(groups, **self.settings)
        states = dict(self.instance.state)
        self.instance.state.clear()
        for group, of_pieces in zip(self.instance.param_groups, groups, strict=True):
            group["params"] = of_pieces["params"]
            group.pop("param_names", None)
        defaults = self.instance.defaults
        counts_on_device = bool(defaults.get("fused") or defaults.get("capturable"))
        for param, state in states.items():
            for piece in pieces.get(param, ()):
                own = self.instance.state[piece.param]
                for kind, value in state.items():
                    is_counter = kind == "step" or (isinstance(value, Tensor) and value.dim() < param.dim())
                    device = piece.param.device if counts_on_device or not is_counter else None
                    own[kind] = _of_piece(value, None if is_counter else piece, param, device)
        return self.instance


def given_optimizers(
    optimizer: Optimizers,
    groups: Iterable[Any] | None,
    settings: Mapping[str, Any],
    params: Iterable[nn.Parameter],
) -> list[Given]:
    """Return the optimizers; `params` are those of a class without groups.

    Raises TypeError for what is no optimizer, ValueError for groups that are no parameter groups, and ConfigError for
    an instance with groups or settings beside it, or one of another `ZeroOptimizer`.
    """
    if isinstance(optimizer, Optimizer):
        optimizer = [optimizer]
    if not isinstance(optimizer, (list, tuple)):
        _check_class(optimizer)
        found = as_groups(params if groups is None else groups)
        return [Given(optimizer, settings, found, range(len(found)))]
    if groups is not None or settings:
        beside = "groups" if groups is not None else ", ".join(settings)
        raise ConfigError(f"ZeroOptimizer got optimizers and {beside}; give these to the optimizers in the list")
    if not optimizer:
        raise ValueError("ZeroOptimizer got an empty list of optimizers; give at least one, such as torch.optim.AdamW")
    given: list[Given] = []
    for one in optimizer:
        _check_instance(one)
        first = sum(len(before.groups) for before in given)
        known = signature(type(one)).parameters
        defaults = {name: value for name, value in one.defaults.items() if name in known}
        numbers = range(first, first + len(one.param_groups))
        given.append(Given(type(one), defaults, as_groups(one.param_groups), numbers, one))
    return given


@contextmanager
def unchanged_if_refused(given: Sequence[Given]) -> Iterator[None]:
    """Give instances their parameters and states back if the body of this context raises."""
    instances = [one.instance for one in given if one.instance is not None]
    before = [(one, dict(one.state), [dict(group) for group in one.param_groups]) for one in instances]
    try:
        yield
    except BaseException:
        for one, state, groups in before:
            one.state.clear()
            one.state.update(state)
            for group, own in zip(one.param_groups, groups, strict=True):
                group.clear()
                group.update(own)
        raise


def bind(optimizer: Optimizer, owner: Any) -> None:
    """Let calls of an optimizer that concern gradients, parameters or states reach `owner`, or be refused.

    `owner` is a weak proxy: a reference from the optimizer would keep it alive.
    """
    bound: Any = optimizer
    bound.zero_owner = owner
    bound.zero_grad = lambda set_to_none=True: owner.zero_grad(set_to_none)
    bound.add_param_group = lambda param_group: owner.add_param_group(param_group)
    for name in ("state_dict", "load_state_dict"):
        setattr(bound, name, partial(_refuse, type(optimizer).__name__, name))


def _refuse(optimizer: str, method: str, *_: object, **__: object) -> None:
    raise RuntimeError(
        f"the states of {optimizer} inside a ZeroOptimizer are divided over ranks; call `{method}` of the "
        "ZeroOptimizer, or `save` and `load` of zero"
    )


def _of_piece(value: Any, piece: Piece | None, param: Tensor, device: torch.device | None) -> Any:
    """Return a copy of a counter, or the part of a parameter's state that is of a piece, in the dtype of its values."""
    if not isinstance(value, Tensor):
        return value
    if piece is None:
        return value.to(device or value.device, copy=True)
    own = cut(value.detach().flatten(), piece.in_param)
    dtype = piece.param.dtype if value.dtype == param.dtype else value.dtype
    return own.to(piece.param.device, dtype, copy=True)


def _check_class(optimizer: object) -> None:
    """Raise TypeError if `optimizer` is neither a class of torch optimizers nor a function that makes one."""
    if not callable(optimizer) or (isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)):
        given = optimizer.__name__ if isinstance(optimizer, type) else f"an object of class {type(optimizer).__name__}"
        raise TypeError(
            "ZeroOptimizer takes a class of optimizers, such as torch.optim.AdamW, and its settings, or a list of "
            f"optimizers, not {given}"
        )


def _check_instance(one: object) -> None:
    if not isinstance(one, Optimizer):
        raise TypeError(f"the list of optimizers of ZeroOptimizer has {one!r}; give optimizers of torch, made before")
    if hasattr(one, "zero_owner"):
        raise ConfigError(f"this {type(one).__name__} is in a ZeroOptimizer already; make another one")
