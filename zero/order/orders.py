"""Orders in which things ran last time, which predict the order of this time: of launches, of units, and of rounds."""

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


class StepOrder:
    """The rounds since the optimizer's last step.

    The next round is expected to be the one that followed the same rounds of a step the last time. If these rounds are
    new, the present one is expected once more: so inference that goes on for ever is predicted from its second forward
    on, and an evaluation now and then deviates twice, where it begins and after its end, however long it is.
    """

    def __init__(self) -> None:
        self.current = Round.STEP
        # `_past` is a hash of the rounds of this step, so that it takes the same time however many they are.
        self._past = self._num_backwards = 0
        self.may_be_uneven = False  # a forward has followed another one in this step, as in an evaluation
        self._followers: dict[int, Round] = {}  # only those that were not expected

    @property
    def expected(self) -> Round:
        """The round that is predicted to be the next."""
        return self._followers.get(self._past, self.current)

    def record(self, following: Round) -> None:
        """Append a round. The first one after the optimizer's step begins the next step."""
        if following is not self.expected:
            self._followers[self._past] = following
        if self._begins_step(following):
            self._past = self._num_backwards = 0
            self.may_be_uneven = False
        self.may_be_uneven |= following is self.current is Round.FORWARD
        self._past = hash((self._past, following.name))  # not its number: -1 and -2 have the same hash
        self._num_backwards += following in (Round.BACKWARD, Round.ACCUMULATION)
        self.current = following

    def describe(self, following: Round) -> str:
        """Return what a rank does next, to complete the sentence "rank 0 ...", and where in the step it is."""
        num_backwards = 0 if self._begins_step(following) else self._num_backwards
        return f"{following} after {num_backwards} micro-batches"

    def _begins_step(self, following: Round) -> bool:
        # Another optimizer of the same model may step after the first one.
        return self.current is Round.STEP and following is not Round.STEP
