"""The check that all ranks launch the same collectives in the same order, if every micro-batch communicates.

Ranks match their collectives by order. If two ranks gather different units at the same point, each takes the other's
parameters for its own if both are as large, and hangs or crashes if they are not. If one runs another micro-batch while
the other steps its optimizer, they hang. Every rank therefore remembers what followed the last time, which was the same
on all ranks, in two orders: the rounds of a step (forwards, backwards, the optimizer's step), and the launches of each
kind of round. As long as both repeat, nothing is exchanged. Before a rank deviates, as in the first step, it waits on
the host until all ranks announce the same next launch or round; from there to the end of the round each launch is
compared before it is made. If another rank announces something else, the rank raises at once; if one does not arrive,
after half of the time that a collective may take.

Ranks may evaluate with different numbers of forwards, and each go on as it has before until one deviates. So from the
second of two forwards in a row to the end of the step, a rank tells those that wait which rounds it begins.
"""

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from parallel.mesh import Axis
from parallel.store import report_reason
from zero.core.protocols.extension import Extension, Launch
from zero.core.protocols.orders import ExecutionOrder, Round
from zero.extensions.host_barrier import BrokenBarrier, HostBarrier


class DivergedRanks(RuntimeError):
    """Raised if ranks run different modules, or different numbers of micro-batches, while each one communicates."""


def check_same_module(module: nn.Module, data: Axis) -> None:
    """Raise DivergedRanks unless the module has the same parameters and buffers on all ranks of `data`.

    Wrapping sends their values one after the other: ranks whose modules differ would wait for each other.
    """
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    described = str([(name, tensor.dtype, tensor.shape) for name, tensor in {**params, **buffers}.items()])
    try:
        HostBarrier(data).wait(
            f"wraps a {type(module).__name__} of {len(params)} parameters and {len(buffers)} buffers, whose names, "
            f"dtypes and shapes have the checksum {crc32(described.encode()):08x}"
        )
    except BrokenBarrier as error:
        raise DivergedRanks(f"{error}; build the same module on all ranks") from error


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


class LaunchOrder(Extension):
    """The order of this rank's launches, each of which has a number, and of the rounds in which it makes them.

    With U units, number k < U stands for the gather of unit k, and number U + i for the reduction of the bucket at
    position i; a `Round` is a negative number. The methods raise DivergedRanks if another rank is about to launch
    something else.
    """

    def __init__(self, data: Axis, compared: Axis):
        """Compare modules over `data`, and launches over `compared`, the ranks that run the same micro-batches."""
        self._wrapping, self._data = data, compared
        self._barrier = HostBarrier(compared)
        self._steps = StepOrder()
        # By the round before, too: the second of two forwards finds units gathered that the first one has left so.
        self._orders: defaultdict[tuple[Round, Round], ExecutionOrder[int]] = defaultdict(ExecutionOrder)
        self._order = ExecutionOrder[int]()  # of the present round
        self._started: Round | None = None
        self._is_compared = False
        self._num_rounds = 0

    def on_wrap(self, module: nn.Module, unit_names: Sequence[str]) -> None:
        """Check that all ranks wrap the same module, and note the names of its units for errors."""
        check_same_module(module, self._wrapping)
        self._unit_names = [name or "the root" for name in unit_names]

    def on_round(self, following: Round) -> None:
        """Let the next launch begin a round, or begin the optimizer's step.

        A round that launches nothing is not recorded: a rank may run it alone.
        """
        self._started = following
        if following is Round.STEP:
            self._begin(following)

    def on_launch(self, kind: Launch, number: int) -> None:
        """Record a launch."""
        launch = number if kind == "gather" else len(self._unit_names) + number
        if self._started is not None:
            self._begin(self._started)
        # Before it is recorded: the error says what was launched before this.
        if self._is_compared or not self._order.predicts(launch):
            self._agree(launch)
        self._order.record(launch)

    def _begin(self, following: Round) -> None:
        self._started = None
        if self._is_compared or not self._order.is_as_long_as_last or following is not self._steps.expected:
            self._agree(following)
        elif self._steps.may_be_uneven:
            self._barrier.tell(self._num_rounds, self._name(following))
        self._num_rounds += 1
        self._order = self._orders[self._steps.current, following]
        self._order.restart()
        self._steps.record(following)
        self._is_compared = False

    def _agree(self, item: int) -> None:
        """Meet all ranks before what deviates, or compare it if they have met. Raises DivergedRanks."""
        if not self._data.has_peers:
            return
        if self._is_compared:
            self._compare(item)
            return
        is_branch = item >= 0 or not self._order.is_as_long_as_last
        try:
            self._barrier.wait(self._describe(item, is_branch), self._num_rounds)
        except BrokenBarrier as error:
            raise self._diverged(f"{error}{self._prediction(is_branch)}", item, is_branch) from error
        self._is_compared = True

    def _compare(self, item: int) -> None:
        """Compare what is next on all ranks. Blocks the host and the device, but only in steps of a new order."""
        own = torch.tensor([item, -item], device="cpu")  # also inside a context of another device
        own = own.to(self._data.communication_device(own))
        with self._data.log.during("agreement"):
            # Two numbers and not one of each rank: this is done before each launch of a step.
            highest = torch.empty_like(own)
            self._data.all_reduce(own, out=highest, op=dist.ReduceOp.MAX).wait()
            if not sum(highest.tolist()):
                return
            items = self._data.gather_by_rank(own[0])
        for rank, other in enumerate(items.tolist()):
            if other != item:
                is_branch, name = max(item, other) >= 0, self._data.name
                raise self._diverged(
                    f"{name} rank {self._data.rank} {self._describe(item, is_branch)}, "
                    f"{name} rank {rank} {self._describe(other, is_branch)}",
                    max(item, other),
                    is_branch,
                )

    def _describe(self, item: int, is_branch: bool) -> str:
        launched = self._order.current
        before = self._name(launched[-1]) if launched else str(self._steps.current)
        return f"{before}, then {self._name(item)}" if is_branch else self._name(item)

    def _prediction(self, is_branch: bool) -> str:
        """Return what the other ranks do if they do not deviate."""
        if is_branch and not self._order.last:
            return ""
        position = len(self._order.current)
        item = self._order.last[position] if position < len(self._order.last) else self._steps.expected
        return f"; from the steps before, it is expected that a rank {self._name(item)}"

    def _name(self, item: int) -> str:
        if item < 0:
            return self._steps.describe(Round(item))
        num_units = len(self._unit_names)
        return f"reduces bucket {item - num_units}" if item >= num_units else f"gathers {self._unit_names[item]}"

    def _diverged(self, what: str, item: int, is_branch: bool) -> DivergedRanks:
        report_reason(text := self._explain(what, item, is_branch))
        return DivergedRanks(text)

    def _explain(self, what: str, item: int, is_branch: bool) -> str:
        if not is_branch:
            return (
                f"ranks are at different points of a step: {what}; if gradients or parameters are partitioned, give "
                "all ranks as many micro-batches (`join` of zero/uneven.py does, if some run out of data first), let "
                "all of them enter `model.gathered()`, or choose a ZeroConfig.stage below 2"
            )
        around = module_around(self._unit_names[item]) if 0 <= item < len(self._unit_names) else ""
        return (
            f"ranks took different branches of the model: {what}; if parameters are partitioned, all ranks must run "
            "the same units in the same order: choose the same branches on all ranks, name only modules that all of "
            f"them run in ZeroConfig.units{around and f', such as {around}'}, or choose a ZeroConfig.stage below 3"
        )


def module_around(unit_name: str) -> str:
    """Return the name of the module that chooses among the elements of a unit's module list; "" is the whole model."""
    path = unit_name.split(".")
    while path and path[-1].isdigit():
        path.pop()
    return ".".join(path[:-1])
