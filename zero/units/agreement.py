"""The check that all ranks launch the same collectives in the same order, if parameters are partitioned.

Ranks match their collectives by order. If two ranks gather different units at the same point, each takes the other's
parameters for its own if both are as large, and hangs or crashes if they are not. Every rank therefore remembers the
order of its launches from one forward to the next, and knows that this order was the same on all ranks. As long as it
repeats, nothing is exchanged. Before a rank deviates, as in the first step, it waits on the host until all ranks
announce the same next launch; from there to the next forward each launch is compared before it is made. If another rank
announces another launch, the rank raises at once; if one does not arrive, after half of the time that a collective may
take.
"""

from collections.abc import Sequence

import torch

from parallel.host_barrier import BrokenBarrier, HostBarrier
from parallel.mesh import Axis
from zero.units.execution_order import ExecutionOrder

END = -1  # stands for a launch: the next forward begins


class DivergedRanks(RuntimeError):
    """Raised if ranks run different modules, or in different orders, while parameters are partitioned."""


class LaunchOrder:
    """The order of this rank's launches, each of which has a number.

    With U units, number k < U stands for the gather of unit k, and number U + i for the reduction of the bucket at
    position i. All methods raise DivergedRanks if another rank is about to launch something else.
    """

    def __init__(self, data: Axis, unit_names: Sequence[str]):
        self._data, self._unit_names = data, [name or "the root" for name in unit_names]
        self._barrier = HostBarrier(data)
        self._order = ExecutionOrder[int]()
        self._is_compared = False

    def restart(self) -> None:
        """Begin a forward."""
        if len(self._order.current) < len(self._order.last) or self._is_compared:
            self._agree(END)
        self._order.restart()
        self._is_compared = False

    def before_gather(self, unit: int) -> None:
        """Record that the parameters of unit number `unit` are gathered next."""
        self._record(unit)

    def before_reduction(self, position: int) -> None:
        """Record that the bucket at `position` in the order of reductions is reduced next."""
        self._record(len(self._unit_names) + position)

    def _record(self, launch: int) -> None:
        # Before it is recorded: the error says what was launched before this.
        if self._is_compared or not self._order.predicts(launch):
            self._agree(launch)
        self._order.record(launch)

    def _agree(self, launch: int) -> None:
        """Meet all ranks before a launch that deviates, or compare it if they have met. Raises DivergedRanks."""
        if not self._data.has_peers:
            return
        if self._is_compared:
            self._compare(launch)
            return
        try:
            self._barrier.wait(self._describe(launch))
        except BrokenBarrier as error:
            raise self._diverged(str(error)) from error
        self._is_compared = True

    def _compare(self, launch: int) -> None:
        """Compare the next launch of all ranks. Blocks the host and the device, but only in steps of a new order."""
        own = torch.tensor([launch])
        own = own.to(self._data.communication_device(own))
        launches = own.new_empty(self._data.size)
        with self._data.log.during("agreement"):
            self._data.all_gather(own, out=launches).wait()
        for rank, other in enumerate(launches.tolist()):
            if other != launch:
                name, own_rank = self._data.name, self._data.rank
                raise self._diverged(
                    f"{name} rank {own_rank} {self._describe(launch)}, {name} rank {rank} {self._describe(other)}"
                )

    def _describe(self, launch: int) -> str:
        launched = self._order.current
        before = self._name(launched[-1]) if launched else "begins"
        return f"{before}, then {self._name(launch)}"

    def _name(self, launch: int) -> str:
        if launch == END:
            return "begins the next forward"
        num_units = len(self._unit_names)
        return f"gathers {self._unit_names[launch]}" if launch < num_units else f"reduces bucket {launch - num_units}"

    def _diverged(self, what: str) -> DivergedRanks:
        return DivergedRanks(
            f"ranks took different branches of the model: {what}; if parameters are partitioned, all ranks must run "
            "the same modules in the same order: choose the same branches on all ranks, or a ZeroConfig.stage below 3"
        )
