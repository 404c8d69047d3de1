"""The process among its peers: the launcher's environment, the device, the process group, and exits on errors.

The only file that reads the launcher's environment variables. It works under `torchrun` and as plain `python`.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist

from parallel.errors import ConfigError
from parallel.torch_internals import FakeStore, default_store

FAILURE_KEY = "failed_ranks"  # in the default store: the number of ranks that have failed
SECONDS_FOR_THE_LINE = 2.0  # the launcher ends every rank at the first exit: the error line must be printed before


@dataclass(frozen=True)
class World:
    """A process and its place in the job. `local_rank` and `local_size` count the ranks of this node only."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    imitated_backend: str | None = None  # set if the other ranks do not exist

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> int:
    return int(os.environ.get("RANK", "0"))


def num_ranks_from_environment() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_world(timeout_seconds: float = 600.0) -> World:
    """Join the ranks that the launcher started: by NCCL on GPUs, by gloo on CPUs; a single process joins nothing.

    Raises ConfigError if the node has more ranks than GPUs.
    """
    size = num_ranks_from_environment()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{local_size} ranks were started on a node of {torch.cuda.device_count()} GPUs; start as many as it "
                "has, with --nproc_per_node, or hide the GPUs with CUDA_VISIBLE_DEVICES="
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if size > 1:
        is_gpu, timeout = device.type == "cuda", timedelta(seconds=timeout_seconds)
        # The ranks agree on their part of the store before the process group uses it: a group that reads what an
        # earlier start has left would connect to processes that have ended.
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=_store_of_this_start(store, rank, size, timeout_seconds),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if is_gpu else None,
        )
    return World(rank_from_environment(), size, local_rank, local_size, device)


def _store_of_this_start(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return a part of the launcher's store that only the ranks of this start of the job use. Raises TimeoutError.

    torchrun keeps one store over its restarts (pytorch/pytorch#135712), and its restart counts differ between nodes: a
    rank may read keys of an earlier start, such as the address of a process that has ended. So rank 0 counts its own
    starts, and replies with that number to every rank that sends a request with an id never used before.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        number, answered = store.add("start/number", 1), set()
        # Rank 0 replies until all ranks have read their reply: a request of an earlier start may be read first, and the
        # present one replaces it.
        while store.add(f"start/{number}/num_joined", 0) < size - 1:
            for key in (f"start/requests/{peer}" for peer in range(1, size)):
                if store.check([key]) and (request := store.get(key).decode()) not in answered:
                    store.set(f"start/replies/{request}", str(number))
                    answered.add(request)
            _pause_until(deadline, f"not all of the {size - 1} other ranks have joined")
    else:
        request = uuid4().hex
        store.set(f"start/requests/{rank}", request)
        while not store.check([f"start/replies/{request}"]):
            _pause_until(deadline, "rank 0 has not joined")
        number = int(store.get(f"start/replies/{request}"))
        store.add(f"start/{number}/num_joined", 1)
    return dist.PrefixStore(f"start/{number}", store)


def _pause_until(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{problem} this start of the job in time")
    time.sleep(0.01)


@contextmanager
def imitated_world(rank: int, size: int, local_size: int, backend: str) -> Iterator[World]:
    """Imitate one rank of `size` on nodes of `local_size` ranks: no other rank exists, and nothing is sent.

    Its device is the CPU. Raises ConfigError if `rank` is not one of the ranks.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank={rank} is not one of the {size} ranks; choose 0 to {size - 1}")
    if size > 1:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, rank % local_size, local_size, torch.device("cpu"), backend)
    finally:
        stop_world()


def stop_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shared_store() -> dist.Store:
    """Return a store that all ranks share, for messages beside the collectives; a process's own if it is alone.

    It has its own connection, so that a thread may wait in it: a wait in the default store blocks all other threads.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    return default_store().clone()  # type: ignore[attr-defined]


def exit_with_error(error: Exception) -> NoReturn:
    """End this rank with exit code 2. The first rank that fails prints the error, in one line.

    Ranks with the same error print it once. A rank that fails alone prints it too; when its process ends, collectives
    of its peers break off, and they find in the store that the reason has been printed (`has_failed_elsewhere`).
    """
    # The failure is counted before anything is printed, and other ranks leave later: the launcher ends every rank as
    # soon as one has ended.
    if _count_failure() == 1:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_THE_LINE)
    sys.stdout.flush()
    os._exit(2)


def has_failed_elsewhere() -> bool:
    """Return True if a peer has printed why it failed: it is the reason why this rank's collective broke off."""
    try:
        return dist.is_initialized() and default_store().check([FAILURE_KEY])
    except (RuntimeError, ValueError):  # the store has ended with the rank that served it
        return True


def _count_failure() -> int:
    """Return the number of ranks that have failed, this one included.

    Before the process group exists, all ranks fail alike: rank 0 counts as the first.
    """
    if not dist.is_initialized():
        return 1 + rank_from_environment()
    try:
        return default_store().add(FAILURE_KEY, 1)
    except (RuntimeError, ValueError):
        return 1
