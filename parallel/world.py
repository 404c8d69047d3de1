"""The process among its peers: the launcher's environment, the device, the process group, and leaving together.

The only file that reads the launcher's environment variables. Works alike under `torchrun` and as plain `python`.
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

FAILURE_KEY = "failed_ranks"  # in the launcher's store: how many ranks have failed so far
SECONDS_FOR_THE_LINE = 2.0  # the launcher ends every rank at the first exit: let the error line get out before


@dataclass(frozen=True)
class World:
    """`local_rank` and `local_size` count the ranks of this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    imitated_backend: str | None = None  # of a world whose other ranks do not exist

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> int:
    return int(os.environ.get("RANK", "0"))


def num_ranks_from_environment() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_world(timeout_seconds: float = 600.0) -> World:
    """Join the ranks that the launcher started: NCCL on GPUs, gloo on CPUs, nothing at all for a process alone.

    Raises ConfigError where there are more ranks than GPUs.
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
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=_part_of_this_start(store, rank, size, timeout_seconds),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if is_gpu else None,
        )
    return World(rank_from_environment(), size, local_rank, local_size, device)


def _part_of_this_start(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """A part of the launcher's store that only the ranks of this start of the job know.

    torchrun keeps one store over its restarts (pytorch/pytorch#135712): a rank may read what a dead one has left, such
    as an address that nobody listens on, and its restart counts differ between nodes. So the first rank counts its own
    starts and gives that number to whoever asks with a word never used before. Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        number, answered = store.add("start/number", 1), set()
        while store.add(f"start/{number}/num_told", 0) < size - 1:
            for key in (f"start/asks/{peer}" for peer in range(1, size)):
                if store.check([key]) and (word := store.get(key).decode()) not in answered:
                    store.set(f"start/answers/{word}", str(number))
                    answered.add(word)
            _pause_until(deadline, f"not all of the {size - 1} other ranks have come")
    else:
        word = uuid4().hex
        store.set(f"start/asks/{rank}", word)
        while not store.check([f"start/answers/{word}"]):
            _pause_until(deadline, "rank 0 has not come")
        number = int(store.get(f"start/answers/{word}"))
        store.add(f"start/{number}/num_told", 1)
    return dist.PrefixStore(f"start/{number}", store)


def _pause_until(deadline: float, complaint: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{complaint} to this start of the job in time")
    time.sleep(0.01)


@contextmanager
def imitated_world(rank: int, size: int, local_size: int, backend: str) -> Iterator[World]:
    """One rank of `size` on nodes of `local_size`: nobody else is there, and nothing is sent. Its device is the CPU.

    Raises ConfigError where there is no such rank.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"dry_run.rank={rank} is not one of the {size} ranks; choose 0 to {size - 1}")
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
    """Words between ranks beside the collectives: the launcher's store, or a process's own where it is alone.

    By a connection of its own, for threads: who waits in the default one, keeps it from all others.
    """
    if not dist.is_initialized():
        return dist.HashStore()
    return default_store().clone()  # type: ignore[attr-defined]


def exit_with_error(error: Exception) -> NoReturn:
    """End this rank with exit code 2 after one line, printed by the first rank that fails. Never returns, never hangs.

    Ranks that find the same mistake say it once; a rank that fails alone is heard, and its peers, whose collectives
    break off when it goes, see in the launcher's store that the reason has been told (`has_failed_elsewhere`).
    """
    if _count_failure() == 1:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_THE_LINE)
    sys.stdout.flush()
    os._exit(2)


def has_failed_elsewhere() -> bool:
    """Whether a peer has told why it failed, so that this rank's broken collective needs no words."""
    try:
        return dist.is_initialized() and default_store().check([FAILURE_KEY])
    except (RuntimeError, ValueError):  # the store went with the rank that held it
        return True


def _count_failure() -> int:
    """How many ranks have failed, this one included. Before the ranks have met, all of them fail alike."""
    if not dist.is_initialized():
        return 1 + rank_from_environment()
    try:
        return default_store().add(FAILURE_KEY, 1)
    except (RuntimeError, ValueError):
        return 1
