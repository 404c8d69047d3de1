"""A barrier on the host, in the launcher's store: for waits that are rare and must fail instead of hanging."""

from datetime import timedelta

import torch.distributed as dist

from parallel.mesh import Axis
from parallel.world import shared_store


class BrokenBarrier(RuntimeError):
    """Not all ranks of the axis reached the barrier in time, or not all of them with the same purpose."""


class HostBarrier:
    """A reusable barrier of all ranks of an axis, which must create their barriers in the same order."""

    def __init__(self, axis: Axis):
        self._axis = axis
        self._num_uses = 0
        if axis.has_peers:
            self._store = shared_store()
            assert axis.group is not None
            first_rank = dist.get_global_rank(axis.group, 0)
            number = self._store.add(f"barriers/of/{axis.name}/{dist.get_rank()}", 1)
            self._prefix = f"barriers/{axis.name}/{first_rank}/{number}"

    def wait(self, purpose: str) -> None:
        """Return when every rank of the axis waits with this purpose; at once on an axis without peers.

        Raises BrokenBarrier as soon as a rank waits with another purpose, or after half of the time that a collective
        may take: peers that went on without this rank wait for it in a collective.
        """
        if not self._axis.has_peers:
            return
        self._num_uses += 1
        prefix = f"{self._prefix}/{self._num_uses}"
        # The own purpose is set before anything is compared: whoever finds a difference reads the other one's.
        self._store.set(f"{prefix}/{self._axis.rank}", purpose)
        common = self._store.compare_set(f"{prefix}/purpose", "", purpose).decode()
        if common != purpose:
            self._store.set(f"{prefix}/end", f"{self._axis.rank}")
            raise BrokenBarrier(f"{self._axis.name} rank {self._axis.rank} {purpose}, another rank {common}")
        # A rank counts as arrived only after its purpose agreed: the last one to arrive ends the wait of all.
        if self._store.add(f"{prefix}/arrived", 1) == self._axis.size:
            self._store.set(f"{prefix}/end", "")
        self._wait_for_end(prefix, purpose)
        if other := self._store.get(f"{prefix}/end").decode():
            their_purpose = self._store.get(f"{prefix}/{other}").decode()
            raise BrokenBarrier(
                f"{self._axis.name} rank {self._axis.rank} {purpose}, {self._axis.name} rank {other} {their_purpose}"
            )

    def _wait_for_end(self, prefix: str, purpose: str) -> None:
        seconds = self._store.timeout.total_seconds() / 2  # type: ignore[attr-defined]
        try:
            self._store.wait([f"{prefix}/end"], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise BrokenBarrier(
                f"{self._axis.name} rank {self._axis.rank} {purpose}, and of {self._axis.size} ranks "
                f"{self._store.add(f'{prefix}/arrived', 0)} did so within {seconds:g} s"
            ) from error
