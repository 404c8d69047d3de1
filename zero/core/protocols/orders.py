"""Orders in which things ran last time, which predict the order of this time, and the rounds of a step."""

from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ExecutionOrder(Generic[Item]):
    """A record of the items of this round, beside the record of the round before.

    Three readers use it: the scheduler prefetches what ran next last time, the ranks check that they launch collectives
    in the order that they have agreed on, and the placement planner plans for the order in which units are visited.
    """

    def __init__(self) -> None:
        self.last: Sequence[Item] = ()
        self.current: list[Item] = []

    def restart(self) -> None:
        """Begin a new round: the current record becomes the prediction."""
        self.last, self.current = self.current, []

    def predicts(self, item: Item) -> bool:
        """Return whether `item` is what came next last time."""
        position = len(self.current)
        return position < len(self.last) and self.last[position] == item

    def record(self, item: Item) -> Sequence[Item]:
        """Append `item`; return what followed it last time, or nothing if it was not predicted.

        After a deviation items are predicted again where they stand at the same position as last time.
        """
        is_predicted = self.predicts(item)
        self.current.append(item)
        return self.last[len(self.current) :] if is_predicted else ()

    @property
    def is_as_long_as_last(self) -> bool:
        """True if as many items have been recorded as last time."""
        return len(self.current) == len(self.last)


class Round(IntEnum):
    """A part of a step in which collectives are launched. The numbers are negative: launches have the others."""

    FORWARD = -1
    BACKWARD = -2
    ACCUMULATION = -3
    READ = -4
    STEP = -5

    def __str__(self) -> str:
        return NAMES[self]


NAMES = {
    Round.FORWARD: "begins a forward",
    Round.BACKWARD: "begins a backward",
    Round.ACCUMULATION: "begins a backward whose gradients are reduced later",
    Round.READ: "gathers parameters to read them",
    Round.STEP: "steps the optimizer",
}
