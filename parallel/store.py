"""The store that all ranks share, for messages outside collectives, and what it tells of ranks that have failed."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from parallel.torch_internals import default_store

T = TypeVar("T")

FAILURE_KEY = "failed_ranks"  # in the default store: the number of ranks that have failed
REASON_KEY = "reason_of_failure"  # there: why a rank has raised that the others may wait for


def shared_store() -> dist.Store:
    """Return a store that all ranks share, for messages outside collectives. A single process gets one of its own.

    It has a connection of its own, so that a thread may block in it: a thread that waits in the default store blocks
    all others that use it.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    return default_store().clone()  # type: ignore[attr-defined]


class Decisions:
    """Decisions of the first rank on what all ranks have found, one after the other. All ranks make the same calls."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._store = rank, size, shared_store()

    def decide(self, own: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Return on all ranks what the first one chooses of what all have found, by rank; both are kept as JSON."""
        key = f"decisions/{self._store.add(f'decisions/of/{self._rank}', 1)}"
        self._store.set(f"{key}/{self._rank}", json.dumps(own))
        if self._rank == 0:
            found = [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self._size)]
            self._store.set(key, json.dumps(choose(found)))
        return json.loads(self._store.get(key))


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
