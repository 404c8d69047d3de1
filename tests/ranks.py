"""A function runs on several ranks, in worker processes that start once and serve every test.

    test process                                        one worker per rank
    run_ranks(2, function, *args)      -- pickle -->    join a fresh gloo group, function(*args), leave the group
    [result of rank 0, result of 1]    <-- pickle --    wait for the next call

If a rank raises, dies or hangs, the call fails, all workers are killed, and the next call starts new ones.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.pairwise import noting

MASTER_ADDRESS = "127.0.0.1"
WAIT_FOREVER = timedelta(days=1)  # `collect` ends the ranks that wait for one that never comes
LATE_DEATH_SECONDS = 10.0  # for which a death is waited for after an error that it may have caused

# What most tests need, among it torch and transformers. It is set here, before any process starts the server.
multiprocessing.set_forkserver_preload(["tests.twins", "pretrain_gpt", "gpt.monitor.plot", "data.encode"])


class RankError(Exception):
    """A rank raised, died or did not answer in time; the message has its number and its traceback."""


class RankDiedError(RankError):
    """A rank's process has ended; the message has its exit code."""


@dataclass(frozen=True)
class RankCall:
    """A call on one rank, with the environment that torchrun would have set."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    environment: dict[str, str]
    init_process_group: bool


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection


@dataclass
class RankPool:
    """Worker processes, started when first needed. Worker i is rank i of a call that has more than i ranks."""

    workers: list[Worker] = field(default_factory=list)

    def run(self, requests: list[bytes], timeout_seconds: float) -> list[Any]:
        """Send request i to worker i; return the results by rank. Raises RankError and stops all workers."""
        try:
            while len(self.workers) < len(requests):
                self.workers.append(start_worker(len(self.workers)))
            for worker, request in zip(self.workers, requests, strict=False):
                worker.connection.send_bytes(request)
            return collect(self.workers[: len(requests)], timeout_seconds)
        except BaseException:  # KeyboardInterrupt too: the ranks are in the middle of a call
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the workers, also in the middle of a call."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        self.workers.clear()


@functools.cache
def rank_pool() -> RankPool:
    """Return the pool of this process; conftest.py stops it at the end."""
    return RankPool()


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 600.0,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call the module-level `function(*args, **kwargs)` on `num_ranks` ranks; return the results by rank.

    Every rank has torchrun's environment variables and, unless `init_process_group` is False, a gloo default group of
    exactly `num_ranks`. Arguments and results are pickled: clone a small view of a large tensor first.
    """
    # Each call has its own store, served by this process as by torchrun's agent: a free port, and no keys of an
    # earlier call.
    store = dist.TCPStore(MASTER_ADDRESS, 0, is_master=True, wait_for_workers=False)
    requests = [
        pickle.dumps(
            RankCall(function, args, kwargs, torchrun_environment(rank, num_ranks, store.port), init_process_group)
        )
        for rank in range(num_ranks)
    ]
    return rank_pool().run(requests, timeout_seconds)


def run_cases(num_ranks: int, function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Call `function(*case)` for each case, in one call of `run_ranks`; return the results of each case by rank."""
    of_ranks = run_ranks(num_ranks, call_with, function, cases, timeout_seconds=600.0 + 10 * len(cases))
    return [list(of_case) for of_case in zip(*of_ranks, strict=True)]


def call_with(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function with one case after the other, each from the same start; an error names its case."""
    results = []
    for case in cases:
        set_fixed_start()
        with noting(case):
            results.append(function(*case))
    return results


def set_fixed_start() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def torchrun_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": MASTER_ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to the store too, instead of serving one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def start_worker(rank: int) -> Worker:
    """Spawn rank 0, and fork the others from a server that has imported what most need and has run nothing.

    Forked ranks iterate over sets in the same order, since they share a hash seed and addresses. Rank 0 has its own, as
    every process of a real run does: code that depends on such an order differs there.
    """
    connection, worker_connection = multiprocessing.Pipe()
    process = start_process("forkserver" if rank else "spawn", serve, worker_connection)
    worker_connection.close()  # only the worker holds the other end: if it dies, this one reads an end of file
    return Worker(process, connection)


def collect(workers: list[Worker], timeout_seconds: float) -> list[Any]:
    """Wait for one answer per worker; raise RankError for the first that fails."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    while pending := [rank for rank in range(len(workers)) if rank not in results]:
        seconds_left = max(0.0, deadline - time.monotonic())
        answered = wait([workers[rank].connection for rank in pending], seconds_left)
        if not answered:
            dump_stacks([workers[rank] for rank in pending])
            raise RankError(
                f"no answer from ranks {pending} of {len(workers)} in {timeout_seconds} s; their stacks are on stderr"
            )
        errors = take_answers(workers, answered, results)
        if errors:
            # A death is named before the broken connections that it leaves to the other ranks. Their answers can come
            # first: a process that ends closes its connections one after another.
            unanswered = [workers[rank].connection for rank in pending if workers[rank].connection not in answered]
            # Without any connection, `wait` would sleep.
            late = take_answers(workers, wait(unanswered, LATE_DEATH_SECONDS), results) if unanswered else []
            raise min(errors + late, key=lambda error: not isinstance(error, RankDiedError))
    return [results[rank] for rank in range(len(workers))]


def take_answers(workers: list[Worker], answered: Sequence[Any], results: dict[int, Any]) -> list[RankError]:
    """Receive the answers that have come into `results`, and return the errors among them."""
    errors = []
    for rank, worker in enumerate(workers):
        if worker.connection in answered:
            try:
                results[rank] = receive(worker, f"rank {rank} of {len(workers)}")
            except RankError as error:
                errors.append(error)
    return errors


def receive(worker: Worker, rank_name: str) -> Any:
    try:
        succeeded, result = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join()
        raise RankDiedError(f"{rank_name} died with exit code {worker.process.exitcode}") from None
    if not succeeded:
        raise RankError(f"{rank_name} raised:\n{result}")
    return result


def dump_stacks(workers: list[Worker]) -> None:
    for worker in workers:
        assert worker.process.pid is not None  # it was started
        os.kill(worker.process.pid, signal.SIGABRT)
    for worker in workers:
        worker.process.join(LATE_DEATH_SECONDS)  # it writes its stacks and ends


def start_process(method: str, function: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start a process that calls a function, by a method of `multiprocessing`."""
    process = multiprocessing.get_context(method).Process(target=function, args=args, daemon=True)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when torch is imported
        process.start()
    return process


def serve(connection: Connection) -> None:
    """Answer calls, as a worker, until the test process closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the workers too; the test process ends them
    faulthandler.enable()  # prints the stacks of all threads, at SIGABRT too
    threading.Thread(target=exit_with_test_process, daemon=True).start()
    gc.freeze()  # the imported modules, as after each call
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(request))


def wait_for_all_to_leave() -> None:
    """Meet in the store: a rank that left now would close connections from which slower ranks still receive."""
    store = dist.distributed_c10d._get_default_store()
    with suppress(dist.DistError):  # rank 0, which serves the store, has seen all and left
        if store.add("left", 1) == dist.get_world_size():
            store.set("all_left", "")
        store.wait(["all_left"], WAIT_FOREVER)


def exit_with_test_process() -> None:
    """Exit when the test process ends, which a rank that hangs in a collective would not notice."""
    test_process = multiprocessing.parent_process()
    assert test_process is not None
    test_process.join()
    os._exit(1)


def answer(request: bytes) -> bytes:
    try:
        result = call_as_rank(pickle.loads(request))
        return pickle.dumps((True, result))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def call_as_rank(call: RankCall) -> Any:
    """Run the call in its own process group, from the same random state and settings every time.

    A rank that fails does not destroy its group: the other ranks would fail too, and hide the first error. A call that
    some ranks leave early on purpose destroys the group itself.
    """
    torch.set_num_threads(1)
    set_fixed_start()
    with mock.patch.dict(os.environ, call.environment):
        if call.init_process_group:
            dist.init_process_group("gloo")
            # A rank that returned at once would close connections that slower ranks are still making.
            dist.barrier()
        result = call.function(*call.args, **call.kwargs)
        if dist.is_initialized():
            wait_for_all_to_leave()
            dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # what is left are modules and caches: not to visit them again makes the next collections short
    return result
