"""The order in which things ran last time, which predicts the order in which they run this time."""

from collections.abc import Hashable, Sequence
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
        """Append `item`; return what followed it last time, or nothing if it was not predicted."""
        is_predicted = self.predicts(item)
        self.current.append(item)
        return self.last[len(self.current) :] if is_predicted else ()

    @property
    def is_as_long_as_last(self) -> bool:
        """True if as many items have been recorded as last time."""
        return len(self.current) == len(self.last)
