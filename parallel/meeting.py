"""Ranks that meet on the host, through the launcher's store: for what happens rarely and must not hang."""

from datetime import timedelta

import torch.distributed as dist

from parallel.mesh import Axis
from parallel.world import shared_store


class NotMet(RuntimeError):
    """Not all ranks of the axis came, or not all with the same purpose."""


class Meetings:
    """Places where all ranks of an axis meet, one after the other. Create it on all of them alike."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._num_meetings = 0
        if axis.has_peers:
            self._store = shared_store()
            assert axis.group is not None
            first_rank = dist.get_global_rank(axis.group, 0)
            series = self._store.add(f"meetings/of/{axis.name}/{dist.get_rank()}", 1)
            self._place = f"meetings/{axis.name}/{first_rank}/{series}"

    def meet(self, purpose: str) -> None:
        """Return when every rank of the axis is here with this purpose; at once where there are no others.

        Raises NotMet as soon as one comes with another, or after half of the time that a collective may take: peers
        that go on without this rank wait in one for it.
        """
        if not self._axis.has_peers:
            return
        self._num_meetings += 1
        place = f"{self._place}/{self._num_meetings}"
        self._store.set(f"{place}/{self._axis.rank}", purpose)
        common = self._store.compare_set(f"{place}/purpose", "", purpose).decode()
        if common != purpose:
            self._store.set(f"{place}/end", f"{self._axis.rank}")
            raise NotMet(f"{self._axis.name} rank {self._axis.rank} {purpose}, another rank {common}")
        if self._store.add(f"{place}/arrived", 1) == self._axis.size:
            self._store.set(f"{place}/end", "")
        seconds = self._store.timeout.total_seconds() / 2  # type: ignore[attr-defined]
        try:
            self._store.wait([f"{place}/end"], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise NotMet(
                f"{self._axis.name} rank {self._axis.rank} {purpose}, and of {self._axis.size} ranks "
                f"{self._store.add(f'{place}/arrived', 0)} did so within {seconds:g} s"
            ) from error
        if other := self._store.get(f"{place}/end").decode():
            their_purpose = self._store.get(f"{place}/{other}").decode()
            raise NotMet(
                f"{self._axis.name} rank {self._axis.rank} {purpose}, {self._axis.name} rank {other} {their_purpose}"
            )
