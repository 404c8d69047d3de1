"""All ranks gather the same units and reduce the same buckets in the same order, or learn at once that they don't.

Ranks match their collectives by order. Two that gather different units at the same point would take one's parameters
for the other's where both are as large, and wait for ever, or die, where not. Each rank therefore knows the order of
last time, from one forward to the next, and that it was the same on all ranks. As long as it repeats, nothing is
exchanged. A rank about to leave it waits until all others are about to do the same, and from there to the next forward
every launch is compared first.
"""

from collections.abc import Sequence

import torch

from parallel.host_barrier import BrokenBarrier, HostBarrier
from parallel.mesh import Axis

END = -1  # instead of a launch: the next forward begins


class DivergedRanks(RuntimeError):
    """Ranks have run different modules, or in different orders, where parameters are partitioned."""


class LaunchOrder:
    """Launches are numbered: the gathers of the units first, then the reductions of the buckets."""

    def __init__(self, data: Axis, unit_names: Sequence[str]):
        self._data, self._unit_names = data, [name or "the root" for name in unit_names]
        self._barrier = HostBarrier(data)
        self._last: list[int] = []
        self._launched: list[int] = []
        self._is_compared = False

    def restart(self) -> None:
        """A forward begins."""
        if len(self._launched) < len(self._last) or self._is_compared:
            self._agree(END)
        self._last, self._launched, self._is_compared = self._launched, [], False

    def before_gather(self, unit: int) -> None:
        """Raises DivergedRanks where other ranks do otherwise."""
        self._next(unit)

    def before_reduction(self, bucket: int) -> None:
        """Raises DivergedRanks where other ranks do otherwise."""
        self._next(len(self._unit_names) + bucket)

    def _next(self, launch: int) -> None:
        position = len(self._launched)
        if self._is_compared or self._last[position : position + 1] != [launch]:
            self._agree(launch)
        self._launched.append(launch)

    def _agree(self, launch: int) -> None:
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
        """Waits for the device, but only in steps whose order is new."""
        own = torch.tensor([launch])
        own = own.to(self._data.device_to_travel_from(own))
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
        before = self._name(self._launched[-1]) if self._launched else "begins"
        return f"{before}, then {self._name(launch)}"

    def _name(self, launch: int) -> str:
        if launch == END:
            return "begins the next forward"
        num_units = len(self._unit_names)
        return f"gathers {self._unit_names[launch]}" if launch < num_units else f"reduces bucket {launch - num_units}"

    def _diverged(self, what: str) -> DivergedRanks:
        return DivergedRanks(
            f"ranks took different branches of the model: {what}; where parameters are partitioned all ranks must run "
            "the same modules in the same order: choose branches alike on all ranks, or a zero.stage below 3"
        )
