"""Run cases in a checkout of any commit: `cd CHECKOUT; python .../lab/compare_commits/child.py`.

Each line of the standard input is a case as JSON, and is answered by a line with the exit codes of its ranks, null for
one that was killed. Ranks are forked from this process, which has imported the checkout's program once.

Only what stays from commit to commit is used: `pretrain_gpt.py` and its settings, the export of a checkpoint,
`CommLog.record`, and torch. A message is noted twice: as the log of the mesh has it, with its operation and its axis,
and as a call of torch.distributed. Messages of the main thread count, from the start of a run to its end.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

Case = dict[str, Any]
FUNCTIONS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv", "isend", "irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
)
GRACE_SECONDS = 30.0  # for the other ranks, after one has failed


class Operations(TorchDispatchMode):
    """The number of operations that the host issues while this mode is active."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **kwargs or {})


class Recorder:
    """The messages of a rank, the times at which its steps begin, and the host operations of a step.

    A step is taken from its first backward pass to that of the next one, since every version of the program calls
    `backward` once for each micro-batch. Operations are counted in the last step but one, and only there: kernels may
    be others where operations are observed.
    """

    def __init__(self, num_steps: int, num_micro_batches: int, counts_operations: bool):
        self._num_steps, self._num_micro_batches = num_steps, num_micro_batches
        self._operations = Operations() if counts_operations else None
        self._num_backwards, self._is_in_backward = 0, False
        self.messages: Counter[str] = Counter()
        self.starts: list[tuple[float, float]] = []  # of each step: time, and processor time of this process

    @property
    def num_operations(self) -> int | None:
        """None if they were not counted, as with another number of backward passes than expected."""
        if self._operations is None or self._num_backwards != self._num_steps * self._num_micro_batches:
            return None
        return self._operations.number

    def install(self) -> None:
        """Replace the functions that are watched, in this process."""
        for name in FUNCTIONS:
            if function := getattr(distributed_c10d, name, None):
                noted = self._noting_call(name, function)
                for module in (dist, distributed_c10d):  # which compare functions with their own
                    setattr(module, name, noted)
        log: Any = importlib.import_module("parallel.comm_log").CommLog
        log.record = self._noting_event(log.record)
        torch.autograd.backward = self._counting(torch.autograd.backward)

    def _noting_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            tensors = [value for value in _flat(values) if isinstance(value, Tensor)]
            largest = max(tensors, key=lambda tensor: tensor.nbytes, default=torch.empty(0))
            groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
            ranks = dist.get_process_group_ranks(groups[0] if groups else None)
            self._note(f"torch's {name} of {largest.nbytes:,} bytes of {largest.dtype} among ranks {ranks}")
            return function(*args, **kwargs)

        return noted

    def _noting_event(self, record: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            event = record(*args, **kwargs)
            self._note(f"{event.op} of {event.message_bytes:,} bytes of {event.dtype} along the {event.axis} axis")
            return event

        return noted

    def _note(self, message: str) -> None:
        if current_thread() is main_thread():
            self.messages[message] += 1

    def _counting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_backward:  # of a checkpoint
                return backward(*args, **kwargs)
            self._begin_backward()
            self._is_in_backward = True
            try:
                return backward(*args, **kwargs)
            finally:
                self._is_in_backward = False

        return counted

    def _begin_backward(self) -> None:
        step, micro_batch = divmod(self._num_backwards, self._num_micro_batches)
        self._num_backwards += 1
        if micro_batch:
            return
        self.starts.append((time.perf_counter(), time.process_time()))
        if self._operations is not None and step == self._num_steps - 2:
            self._operations.__enter__()
        if self._operations is not None and step == self._num_steps - 1:
            self._operations.__exit__(None, None, None)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def run_rank(rank: int, port: int, case: Case) -> None:
    """Run a case as one of its ranks, and write what was recorded to rank-N.json in the folder of the case."""
    folder = Path(case["folder"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case["ranks"], "LOCAL_WORLD_SIZE": case["ranks"]}
    os.environ.update({name: str(value) for name, value in (numbers | {"MASTER_PORT": port}).items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    recorder = Recorder(case["steps"], case["micro_batches"], case["counts_operations"])
    recorder.install()
    with arguments_of("pretrain_gpt.py", *case["arguments"], f"--run.dir={folder / 'run'}"):
        runpy.run_path("pretrain_gpt.py", run_name="__main__")
    if rank == 0 and (checkpoints := folder / "run" / "checkpoints").exists():
        with arguments_of("export", str(checkpoints), f"--output={folder / 'weights'}", "--dtype=fp32"):
            runpy.run_module("gpt.checkpoint.export", run_name="__main__")
    found = {"messages": recorder.messages, "operations": recorder.num_operations, "starts": recorder.starts}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


@contextmanager
def arguments_of(*words: str) -> Iterator[None]:
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before


def run_case(case: Case) -> list[int | None]:
    """Return the exit code of each rank, None for one that has not ended in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [get_context("fork").Process(target=run_rank, args=(rank, port, case)) for rank in range(case["ranks"])]
    for rank in ranks:
        rank.start()
    deadline, has_failed = time.monotonic() + case["limit_seconds"], False
    while alive := [rank for rank in ranks if rank.is_alive()]:
        if not has_failed and any(rank.exitcode for rank in ranks):
            deadline, has_failed = min(deadline, time.monotonic() + GRACE_SECONDS), True
        if not connection.wait([rank.sentinel for rank in alive], max(0.0, deadline - time.monotonic())):
            break
    for rank in alive:
        rank.kill()
    for rank in ranks:
        rank.join()
    return [None if rank in alive else rank.exitcode for rank in ranks]


def main() -> None:
    sys.path[0] = str(Path.cwd())  # instead of the folder of this file
    importlib.import_module("pretrain_gpt")
    importlib.import_module("gpt.checkpoint.export")
    for line in sys.stdin:
        print(json.dumps(run_case(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
