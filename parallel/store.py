"""The store that all ranks share, for messages outside collectives, and what it tells of ranks that have failed."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from parallel.torch_internals import default_store

T = TypeVar("T")

FAILURE_KEY = "failed_ranks"  # in the default store: the number of ranks that have failed
REASON_KEY = "reason_of_failure"  # there: why a rank has raised that the others may wait for
POLL_SECONDS = 0.1  # of a thread that waits while another one waits on the connection for waits


class SharedStore(dist.PrefixStore):
    """A process's view of the store that all ranks share, by two connections: any thread may wait in it.

    A thread that waits on a connection blocks all others that use it. So waits have one of their own, and `get` must
    not wait: the key is there, or was waited for.
    """

    def __init__(self, store: dist.Store):
        super().__init__("shared", store.clone())  # type: ignore[attr-defined]
        self._waits = dist.PrefixStore("shared", store.clone())  # type: ignore[attr-defined]
        self._turn = threading.Lock()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are set. Raises DistStoreError if the time is over."""
        timeout = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        if self._turn.acquire(blocking=False):
            try:
                self._waits.wait(keys, timeout)
            finally:
                self._turn.release()
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"not all of {keys} are set within {timeout}")
            time.sleep(POLL_SECONDS)


# The connections of this process, by the default store: each rank has three to it with that of torch. A store of ten
# thousand ranks needs as many open files.
_SHARED: WeakKeyDictionary[dist.Store, SharedStore] = WeakKeyDictionary()


def shared_store() -> dist.Store:
    """Return a store that all ranks share, for messages outside collectives. A single process gets one of its own."""
    if not dist.is_initialized():
        return dist.HashStore()
    default = default_store()
    if default not in _SHARED:
        _SHARED[default] = SharedStore(default)
    return _SHARED[default]


class Decisions:
    """Decisions of the first rank on what all ranks have found, one after the other. All ranks make the same calls.

    Ranks that are not all of the job give a name that others do not have.
    """

    def __init__(self, rank: int, size: int, name: str = "all") -> None:
        self._rank, self._size, self._name, self._store = rank, size, f"decisions/{name}", shared_store()

    def decide(self, own: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Return on all ranks what the first one chooses of what all have found, by rank; both are kept as JSON."""
        key = f"{self._name}/{self._store.add(f'{self._name}/of/{self._rank}', 1)}"
        self._store.set(f"{key}/{self._rank}", json.dumps(own))
        if self._rank == 0:
            found = self._values([f"{key}/{rank}" for rank in range(self._size)])
            self._store.set(key, json.dumps(choose(found)))
        return self._values([key])[0]

    def _values(self, keys: Sequence[str]) -> list[Any]:
        self._store.wait(list(keys))
        return [json.loads(value) for value in self._store.multi_get(list(keys))]


def num_failures() -> int | None:
    """Return the number of ranks that have failed, or None if the rank that serves the store has ended."""
    if not dist.is_initialized():
        return 0
    try:
        return default_store().add(FAILURE_KEY, 0)
    except (RuntimeError, ValueError):
        return None


def has_failed_elsewhere() -> bool:
    """Return True if another rank has failed, and printed why unless its node was lost with the store."""
    return num_failures() != 0


def report_reason(reason: str) -> None:
    """Tell the other ranks why this one raises: they may wait for it in a collective."""
    with suppress(RuntimeError, ValueError):  # the rank that serves the store has ended
        default_store().set(REASON_KEY, reason)


def withdraw_reason() -> None:
    """Forget what was reported: the ranks have handled that error, and agree again."""
    with suppress(RuntimeError, ValueError):
        default_store().delete_key(REASON_KEY)


def with_reason(collective: Callable[[], T]) -> T:
    """Launch a collective, or wait for one; its RuntimeError tells what a rank that has left it has reported."""
    try:
        return collective()
    except RuntimeError as error:
        reason = ""
        with suppress(RuntimeError, ValueError):
            if default_store().check([REASON_KEY]):
                reason = default_store().get(REASON_KEY).decode()
        if not reason:
            raise
        raise RuntimeError(f"{reason} (this rank waited for another one in a collective: {error})") from error
