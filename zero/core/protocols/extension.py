"""Extensions of an engine, which observe what it does and wait or place for it; the core knows none of them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from parallel.mesh import Work
from zero.core.protocols.orders import Round

Launch = Literal["gather", "reduce"]
Pass = Literal["forward", "backward"]
Extended = TypeVar("Extended", bound="Extension")


class Extension:
    """An observer of an engine, whose methods do nothing. The host calls them; those that launch do so on all ranks.

    One that refers to the engine, and not weakly, keeps its memory until Python's collector of cycles runs.
    """

    def on_wrap(self, module: nn.Module, unit_names: Sequence[str]) -> None:
        """Note that a module is wrapped, before anything is launched.

        Units have their names, "" that of the root, in the order of their numbers.
        """

    def on_built(self, engine: Any) -> None:
        """Note that the `Engine` is complete; an optimizer is attached later."""

    def on_round(self, following: Round) -> None:
        """Note that the launches from here on belong to another round of the step.

        Each micro-batch has a forward, in all stages, and so has each call of a part of the model.
        """

    def on_launch(self, kind: Launch, number: int) -> None:
        """Note the next launch: the gather of unit `number`, or the reduction of the bucket at this position.

        Positions are those of the order of reductions, the reverse of the layout.
        """

    def on_unit(self, number: int, phase: Pass) -> None:
        """Note that a unit is about to be unsharded, if it is not yet, and to compute."""

    def after_unshard(self, number: int) -> None:
        """Note that the unit of the last `on_unit` is unsharded, and that its computation follows."""

    def on_backward(self) -> bool | None:
        """Note that a backward begins. Return False if its gradients are not to be used: it then is in no step."""

    def on_gradient(self, number: int, grad: Tensor) -> None:
        """Note a gradient, flat, as autograd gives it; `number` is the parameter's in the order of reductions."""

    def before_update(self) -> None:
        """Note that all gradients of a step are reduced or on their way, and an update follows."""

    def take_gathers(self, gathers: Sequence[tuple[Sequence[nn.Parameter], Work]]) -> bool:
        """Return True to take the last gathers of an update, each with its parameters, and to wait for them later.

        The engine reads no parameter before `before_read` of it. Reads beside the engine are reported of parameters
        that are watched (`ParameterGuard.watch`).
        """
        return False

    def before_read(self, params: Iterable[nn.Parameter] | None) -> None:
        """Wait for the gathers that have been taken of some parameters, or of all, before they are read or written."""

    def after_update(self) -> None:
        """Note the end of an update, also of one that was skipped."""


class Extensions(Extension):
    """The extensions of an engine as one: each method calls, in their order, those that override it."""

    def __init__(self, extensions: Sequence[Extension]):
        self._all = list(extensions)
        self._select()

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._all)

    @contextmanager
    def extended(self, extension: Extended) -> Iterator[Extended]:
        """Let another extension observe the engine inside this context."""
        self._all.append(extension)
        self._select()
        try:
            yield extension
        finally:
            self._all = [each for each in self._all if each is not extension]
            self._select()

    def on_wrap(self, module: nn.Module, unit_names: Sequence[str]) -> None:
        for each in self._overriding["on_wrap"]:
            each.on_wrap(module, unit_names)

    def on_built(self, engine: Any) -> None:
        for each in self._overriding["on_built"]:
            each.on_built(engine)

    def on_round(self, following: Round) -> None:
        for each in self._overriding["on_round"]:
            each.on_round(following)

    def on_launch(self, kind: Launch, number: int) -> None:
        for each in self._overriding["on_launch"]:
            each.on_launch(kind, number)

    def on_unit(self, number: int, phase: Pass) -> None:
        for each in self._overriding["on_unit"]:
            each.on_unit(number, phase)

    def after_unshard(self, number: int) -> None:
        for each in self._overriding["after_unshard"]:
            each.after_unshard(number)

    def on_backward(self) -> bool:
        return False not in [each.on_backward() for each in self._overriding["on_backward"]]

    def on_gradient(self, number: int, grad: Tensor) -> None:
        for each in self._overriding["on_gradient"]:
            each.on_gradient(number, grad)

    def before_update(self) -> None:
        for each in self._overriding["before_update"]:
            each.before_update()

    def take_gathers(self, gathers: Sequence[tuple[Sequence[nn.Parameter], Work]]) -> bool:
        return any(each.take_gathers(gathers) for each in self._overriding["take_gathers"])

    def before_read(self, params: Iterable[nn.Parameter] | None) -> None:
        for each in self._overriding["before_read"]:
            each.before_read(params)

    def after_update(self) -> None:
        for each in self._overriding["after_update"]:
            each.after_update()

    def _select(self) -> None:
        names = [name for name in vars(Extension) if not name.startswith("_")]
        self._overriding = {
            name: [each for each in self._all if getattr(type(each), name) is not getattr(Extension, name)]
            for name in names
        }
