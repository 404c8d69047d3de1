"""Extensions of an engine, which observe its rounds, launches, gradients and updates; the core knows none of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from torch import Tensor

from zero.order.orders import Round

Launch = Literal["gather", "reduce"]
Extended = TypeVar("Extended", bound="Extension")


class Extension:
    """An observer of an engine, whose methods do nothing. The host calls them; those that launch do so on all ranks.

    One that refers to the engine keeps its memory until Python's collector of cycles runs.
    """

    def on_round(self, following: Round) -> None:
        """Note that the launches from here on belong to another round of the step."""

    def on_launch(self, kind: Launch, number: int) -> None:
        """Note the next launch: the gather of unit `number`, or the reduction of the bucket at this position.

        Positions are those of the order of reductions, the reverse of the layout.
        """

    def on_backward(self) -> bool | None:
        """Note that a backward begins. Return False if its gradients are not to be used: it then is in no step."""

    def on_gradient(self, number: int, grad: Tensor) -> None:
        """Note a gradient, flat, as autograd gives it; `number` is the parameter's in the order of reductions."""

    def before_update(self) -> None:
        """Note that all gradients of a step are reduced or on their way, and an update follows."""

    def after_update(self) -> None:
        """Note the end of an update, also of one that was skipped."""


class Extensions:
    """The extensions of an engine: for each method, in their order, those of the ones that override it."""

    on_round: list[Callable[[Round], None]]
    on_launch: list[Callable[[Launch, int], None]]
    on_backward: list[Callable[[], bool | None]]
    on_gradient: list[Callable[[int, Tensor], None]]
    before_update: list[Callable[[], None]]
    after_update: list[Callable[[], None]]

    def __init__(self, extensions: Sequence[Extension]):
        self._all = list(extensions)
        self._select()

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

    def _select(self) -> None:
        for name in (name for name in vars(Extension) if not name.startswith("_")):
            overriding = [each for each in self._all if getattr(type(each), name) is not getattr(Extension, name)]
            setattr(self, name, [getattr(each, name) for each in overriding])
