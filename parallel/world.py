"""The process and the job that it belongs to: launcher's environment, device, process group, and exit on errors.

Only this file reads the launcher's environment variables; `parallel/process_defaults.py` changes what they leave unset.
It works under `torchrun` and under plain `python`.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Literal, NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist

from parallel.ending import EXIT_LOST, EXIT_USER_ERROR, end_process
from parallel.pairwise import complete_all
from parallel.process_defaults import (
    num_gpus_of_node,
    raise_file_limit,
    set_variables,
    share_cores,
    use_large_pages,
)
from parallel.store import FAILURE_KEY, has_failed_elsewhere, num_failures
from parallel.torch_internals import FakeStore, default_store, take_default_timeout
from parallel.validation.errors import ConfigError, NodeError

LEFT_KEY = "ranks_that_leave"  # in the default store: the number of ranks that have called `stop_world`
LOSS_KEY = "ranks_that_lost_another"  # in the default store: the number of ranks that have noticed the loss of one
# Parts of the messages of gloo and NCCL, whose errors have no class for this.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "remote process exited",
)
START_REMEDY = "start ranks with torchrun, or unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for one process"
NUMBERS_OF_RANKS = range(1, 2**20 + 1)
SHOWN_CHARACTERS = 60  # of a variable in an error
LAUNCH_VARIABLE = "ZERO_START_OF_LAUNCH"  # "LAUNCH NUMBER", set by parallel.launch.elastic
NOTES_VARIABLE = "ZERO_LAUNCH_NOTES"  # the folder of the first rank's notes, set by launchers that read them
STEP_NOTE, UNFINISHED_NOTE = "step", "unfinished"  # the last step that was begun; the run was stopped before its end
DISCARD_PORT = 9  # to which a route is asked for
START_SECONDS = 600.0  # for which ranks wait for each other at the start of a job
FOREVER = timedelta(days=365)
# A collective times out after this many times `hang_seconds`. The watchdog of parallel/watchdog.py, which names the
# rank that hangs, may need 2.5 times as long: torch counts from the launch, and aborts without a name.
HANGS_PER_TIMEOUT = 3
PRINT_SECONDS = 30.0  # for which a rank that prints nothing waits, at most, until another one has printed the error
LOSS_SECONDS = 5.0  # for which a rank that has lost another one waits, so that the launcher sees that one end first
THREADS, GLOO_THREAD = Path("/proc/self/task"), "(pt_gloo_runloop)"  # the states of threads; the name of those of gloo
NUM_IDLE_READINGS = 3  # of these states, after which gloo's threads have dropped their tensors
SECONDS_TO_DROP_TENSORS = 60.0  # reached only if one of these threads hangs


@dataclass(frozen=True)
class StartOptions:
    """The wishes of a program for its process.

    `device`: "auto" is the GPU, or the CPU on a node without GPUs. `hang_seconds`: after three times as long, and at
    least `START_SECONDS`, a collective fails; 0: never. `orders_launches`: see `set_variables`. `record_folder`: where
    torch writes its record of NCCL's collectives when one has failed in this way. `fixes_kernels`: the number of ranks
    must not change which kernels compute, or in how many threads.
    """

    device: Literal["auto", "cpu"] = "auto"
    hang_seconds: float = 600.0
    orders_launches: bool = False
    record_folder: Path | None = None
    fixes_kernels: bool = False

    @property
    def collective_timeout(self) -> timedelta:
        # While a run is built and data is indexed, ranks wait for each other longer than in a step.
        seconds = max(START_SECONDS, HANGS_PER_TIMEOUT * self.hang_seconds)
        return timedelta(seconds=seconds) if self.hang_seconds else FOREVER


@dataclass(frozen=True)
class World:
    """A process and its place in the job. `local_rank` and `local_size` count the ranks of this node only."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    imitated_backend: str | None = None  # the backend of the imitated job; None in a real one

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> int:
    """Return the number of this process. Raises ConfigError if the launcher's variables cannot be."""
    return _number("RANK", 0, range(num_ranks_from_environment()))


def num_ranks_from_environment() -> int:
    """Return the number of processes of the job. Raises ConfigError if that of the environment cannot be."""
    return _number("WORLD_SIZE", 1, NUMBERS_OF_RANKS)


def _place_on_node() -> tuple[int, int]:
    """Return the number of this process on its node, and of all processes there."""
    local_size = _number("LOCAL_WORLD_SIZE", num_ranks_from_environment(), NUMBERS_OF_RANKS)
    return _number("LOCAL_RANK", 0, range(local_size)), local_size


def _number(name: str, default: int, possible: range) -> int:
    """Return the number in a variable of the environment. Raises ConfigError if it is not one of those `possible`."""
    text = os.environ.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = possible.start - 1
    if number not in possible:
        raise ConfigError(
            f"the environment has {name}={text[:SHOWN_CHARACTERS]}, a number from {possible.start} to "
            f"{possible.stop - 1} is needed; {START_REMEDY}"
        )
    return number


def _check_rendezvous() -> None:
    """Raise ConfigError if the environment does not say where the ranks of a job meet."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            size = num_ranks_from_environment()
            raise ConfigError(f"the environment has WORLD_SIZE={size} and no {name}; {START_REMEDY}")
    _number("MASTER_PORT", 0, range(2**16))


def address_of_node() -> str:
    """Return an address by which the ranks of all nodes reach this one: they have reached that of the first node."""
    first = os.environ.get("MASTER_ADDR", "localhost")
    if rank_from_environment() == _place_on_node()[0]:
        return first
    family, kind, *_, address = socket.getaddrinfo(first, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, and finds the route
        return probe.getsockname()[0]


def start_of_launch() -> tuple[str, int] | None:
    """Return (launch, number of its present start) if an elastic launch has started this process, else None.

    A start begins when the ranks of all earlier ones have ended, or cannot be reached any more.
    """
    launch, _, number = os.environ.get(LAUNCH_VARIABLE, "").partition(" ")
    return (launch, int(number)) if launch else None


def note_for_launcher(name: str, text: str = "") -> None:
    """Write a note of the run's first rank for its launcher, if that reads them."""
    with suppress(OSError, KeyError):
        Path(os.environ[NOTES_VARIABLE], name).write_text(text)


def is_restart() -> bool:
    """Return True if the launcher, or the scheduler, has started the ranks of this job before."""
    own = start_of_launch()  # which counts from 1, and torchrun from 0
    num_restarts = str(own[1] - 1) if own else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {num_restarts, os.environ.get("SLURM_RESTART_COUNT", "0")} != {"0"}


def start_world(options: StartOptions = StartOptions()) -> World:
    """Create the process group of the ranks that the launcher started: NCCL on GPUs, gloo on CPUs.

    A single process gets no process group. Raises NodeError if the ranks do not fit to the node's GPUs, and ConfigError
    if the variables of the launcher are missing, or cannot be.
    """
    size = num_ranks_from_environment()
    local_rank, local_size = _place_on_node()
    if size > 1:
        _check_rendezvous()
    raise_file_limit()  # before rank 0 serves a store, and before data is opened
    set_variables(os.environ, options.orders_launches, options.record_folder, options.fixes_kernels)
    device = _choose_device(options.device, local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_large_pages(os.environ, device)
    share_cores(os.environ, local_size, device, options.fixes_kernels)
    if size > 1:
        # The ranks agree on a prefix of the store before the process group uses it: a group that reads the keys of an
        # earlier start would try to connect to processes that have ended.
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
        store.set_timeout(options.collective_timeout)  # torch gives it to the stores that it makes itself
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store_of_this_start(store, rank, size, START_SECONDS),
            rank=rank,
            world_size=size,
            timeout=options.collective_timeout,
            device_id=device if device.type == "cuda" else None,
        )
    return World(rank_from_environment(), size, local_rank, local_size, device)


def _choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of this rank. Raises NodeError, on all ranks of the node alike."""
    if wanted == "cpu" or not torch.cuda.is_available():
        # GPUs that are hidden by an empty variable are hidden by the user: schedulers unset it, or name no device.
        is_asked_for = wanted == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if not is_asked_for and (num_gpus := num_gpus_of_node()):
            raise NodeError(
                f"{gethostname()}: torch {torch.__version__} can use none of the node's {num_gpus} GPUs; install torch "
                "for CUDA, ask the scheduler for GPUs, or choose StartOptions.device=cpu to train on the CPU"
            )
        return torch.device("cpu")
    num_visible = torch.cuda.device_count()
    if 1 < num_visible < local_size:
        raise NodeError(
            f"{gethostname()}: {local_size} ranks were started on a node of {num_visible} GPUs; start as many as it "
            "has, with --nproc_per_node, or choose StartOptions.device=cpu"
        )
    # A rank of Slurm's --gpus-per-task=1 sees its own GPU only. NCCL refuses two ranks on one GPU.
    return torch.device("cuda", local_rank % num_visible)


def _store_of_this_start(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return a view of the launcher's store that only the ranks of this start of the job use. Raises TimeoutError.

    torchrun keeps one store over all restarts (pytorch/pytorch#135712), so a rank may read keys of an earlier start,
    such as the address of a process that has ended. torchrun's own count of restarts may differ between nodes. So rank
    0 counts its starts, every other rank sends it a request with a new random id, and rank 0 replies with the number.
    """
    if rank == 0:
        deadline = time.monotonic() + timeout_seconds
        number, answered, pause = store.add("start/number", 1), set[str](), 0.01
        # Among the requests are those of earlier starts, so their number does not tell when all ranks have joined.
        while store.add(f"start/{number}/num_joined", 0) < size - 1:
            requests = store.get("start/requests").decode().split() if store.check(["start/requests"]) else []
            if new := [request for request in requests if request not in answered]:
                store.multi_set([f"start/replies/{request}" for request in new], [str(number)] * len(new))  # type: ignore[attr-defined]
                answered.update(new)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of the {size - 1} other ranks have joined this start of the job in time")
            time.sleep(pause)
            pause = min(0.25, 1.1 * pause)  # a job of many ranks starts slowly, and each time all requests are read
    else:
        request = uuid4().hex
        store.append("start/requests", f"{request}\n")  # type: ignore[attr-defined]
        # Only rank 0 asks again and again: the store could not answer all ranks of a large job if each did so.
        try:
            store.wait([f"start/replies/{request}"], timedelta(seconds=timeout_seconds))
        except dist.DistStoreError as error:
            raise TimeoutError("rank 0 has not joined this start of the job in time") from error
        number = int(store.get(f"start/replies/{request}"))
        store.add(f"start/{number}/num_joined", 1)
    return dist.PrefixStore(f"start/{number}", store)


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
    """Leave the process groups. Call it before the process ends."""
    if dist.is_initialized():
        is_gloo = "gloo" in dist.get_backend()
        if is_gloo:
            _wait_for_all_to_leave()
        dist.destroy_process_group()
        if is_gloo:
            _wait_until_gloo_is_idle()


def _wait_for_all_to_leave() -> None:
    """Complete the messages under way, and wait for the other ranks, no longer than a collective would.

    Gloo resets its connections when a rank leaves: what another rank has yet to receive would be lost. So the ranks
    meet in the store, and not in a collective, whose own last messages could be lost.
    """
    with suppress(RuntimeError, ValueError):  # another rank has ended, or the one that serves the store
        complete_all()
        store, size = default_store(), dist.get_world_size()
        # The number of this group among those that have used the store, if the caller has made it.
        number, num_before = divmod(store.add(LEFT_KEY, 1) - 1, size)
        if num_before == size - 1:
            store.set(f"{LEFT_KEY}/{number}", "")
        store.wait([f"{LEFT_KEY}/{number}"], take_default_timeout(dist.group.WORLD))


def _wait_until_gloo_is_idle() -> None:
    """Wait until gloo's threads sleep: they have then dropped their tensors.

    A thread of gloo drops its tensors some time after their collective was waited for, and needs the interpreter for
    that. If it is being finalized, the process is aborted. A thread also sleeps while it waits for the interpreter, so
    it must do so in several readings, between which the interpreter is free.
    """
    num_idle, deadline = 0, time.monotonic() + SECONDS_TO_DROP_TENSORS
    while num_idle < NUM_IDLE_READINGS and time.monotonic() < deadline:
        time.sleep(0.01)
        num_idle = num_idle + 1 if _gloo_sleeps() else 0


def _gloo_sleeps() -> bool:
    for path in THREADS.glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            _, is_of_gloo, state = path.read_text().partition(GLOO_THREAD)
            if is_of_gloo and not state.startswith(" S"):
                return False
    return True


@contextmanager
def exit_as_rank(*others: type[Exception]) -> Iterator[None]:
    """Leave the process groups after this block. An error in it ends this rank with the exit code that tells why.

    A ConfigError, or one of `others`, is one that the user can correct. A collective fails if another rank has left;
    that one has printed its reason, unless it was lost. Commands of one process use `exit_on_config_error`.
    """
    user_errors: tuple[type[Exception], ...] = (ConfigError, *others)
    try:
        yield
    except user_errors as error:
        exit_with_error(error)
    except RuntimeError as error:
        if _has_lost_a_rank(error):
            _exit_after_loss(error)
        if has_failed_elsewhere():
            exit_with_error(error)
        raise
    stop_world()


def exit_with_error(error: Exception) -> NoReturn:
    """End this rank with exit code 2. Only the first rank that fails prints its error, in one line.

    If several ranks raise the same error, it is thus printed once. If one rank fails alone, collectives of the others
    fail when its process ends, and `has_failed_elsewhere` tells them that the reason has been printed.
    """
    # The failure is counted before anything is printed: the count decides who prints.
    is_first = _count(FAILURE_KEY, isinstance(error, NodeError)) == 1
    _print_and_exit(str(error), is_first, FAILURE_KEY, EXIT_USER_ERROR)


def _has_lost_a_rank(error: Exception) -> bool:
    """Return True if `error` is due to another rank, or its node, that has ended without printing why."""
    num_failed = num_failures()
    return num_failed is None or (num_failed == 0 and any(part in str(error) for part in LOST_CONNECTION))


def _exit_after_loss(error: Exception) -> NoReturn:
    """End this rank because another one was lost.

    Only the first rank that notices prints a line. It ends after a pause: on the node of the lost rank, the launcher
    then takes that one for the first that failed.
    """
    found = next((part for part in LOST_CONNECTION if part in str(error)), str(error).strip().partition("\n")[0])
    reason = f"another rank or its node was lost ({found}); start again; training resumes from its checkpoint"
    is_first = _count(LOSS_KEY, is_of_node=False) == 1
    time.sleep(LOSS_SECONDS)
    _print_and_exit(reason, is_first, LOSS_KEY, EXIT_LOST)


def _print_and_exit(reason: str, is_first: bool, key: str, code: int) -> NoReturn:
    """End this rank. The first one prints an error line, and the others wait: the launcher kills all when one exits."""

    def meet() -> None:
        with suppress(OSError):  # of a full disk
            sys.stdout.flush()
        if dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # the time is over, or the rank that serves the store has ended
                if is_first:
                    default_store().set(f"{key}/printed", "")
                else:
                    default_store().wait([f"{key}/printed"], timedelta(seconds=PRINT_SECONDS))
        elif not is_first:
            time.sleep(PRINT_SECONDS)  # nothing tells when it is printed; the launcher then ends this process

    end_process(code, reason if is_first else "", meet)


def _count(key: str, is_of_node: bool) -> int:
    """Return the number of ranks that have counted under `key`, this one included; of the node, if it `is_of_node`.

    Before the process group exists there is no store to count in, and all ranks fail alike: rank 0 counts as the first.
    """
    if not dist.is_initialized():
        with suppress(ConfigError):  # the environment is what is wrong, maybe on this rank only
            local_rank, _ = _place_on_node()
            return 1 + (local_rank if is_of_node else rank_from_environment())
        return 1
    try:
        return default_store().add(key, 1)
    except (RuntimeError, ValueError):
        return 1
