"""A barrier on the host, by the launcher's store: for rare waits that must raise instead of hanging."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from parallel.mesh import Axis
from parallel.world import has_failed_elsewhere, shared_store

POLL_SECONDS = 1.0  # after which a rank that waits asks whether another one has failed


class BrokenBarrier(RuntimeError):
    """An error of all ranks at the barrier: some did not reach it in time, or their purposes differ."""


class HostBarrier:
    """A reusable barrier of all ranks of an axis. All of them must create their barriers in the same order."""

    def __init__(self, axis: Axis, clock: Callable[[], float] = time.monotonic):
        self._axis, self._clock = axis, clock
        self._num_uses = 0
        if axis.has_peers:
            self._store = shared_store()
            assert axis.group is not None
            first_rank = dist.get_global_rank(axis.group, 0)
            # The n-th barrier that this rank creates on the axis, and so the n-th of every rank.
            number = self._store.add(f"barriers/of/{axis.name}/{dist.get_rank()}", 1)
            self._prefix = f"barriers/{axis.name}/{first_rank}/{number}"

    def wait(self, purpose: str) -> None:
        """Return when every rank of the axis waits with this purpose; at once on an axis without peers.

        `purpose` completes the sentence "rank 0 ...". Raises BrokenBarrier as soon as a rank waits with another
        purpose, or after half of a collective's timeout: ranks that did not enter the barrier may wait for this one in
        a collective, which must not time out first.
        """
        if not self._axis.has_peers:
            return
        self._num_uses += 1
        prefix = f"{self._prefix}/{self._num_uses}"
        # Each rank sets its purpose before it compares: the rank whose purpose differs is named with its purpose below.
        self._store.set(f"{prefix}/{self._axis.rank}", purpose)
        common = self._store.compare_set(f"{prefix}/purpose", "", purpose).decode()
        if common != purpose:
            self._store.set(f"{prefix}/end", f"{self._axis.rank}")
            raise BrokenBarrier(f"{self._axis.name} rank {self._axis.rank} {purpose}, another rank {common}")
        # A rank is counted after its purpose was found to agree: if the last one is counted, all purposes agree.
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
        end = self._clock() + seconds
        while True:
            try:
                self._store.wait([f"{prefix}/end"], timedelta(seconds=min(POLL_SECONDS, seconds)))
                return
            except RuntimeError as error:
                has_failed = has_failed_elsewhere()
                if self._clock() < end and not has_failed:
                    continue
                others = "another rank has failed"
                if not has_failed:
                    num_arrived = self._store.add(f"{prefix}/arrived", 0)
                    others = f"of {self._axis.size} ranks {num_arrived} did so within {seconds:g} s"
                raise BrokenBarrier(f"{self._axis.name} rank {self._axis.rank} {purpose}, and {others}") from error
