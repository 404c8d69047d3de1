"""A run of pretrain_gpt.py in which a rank fails on purpose, as if its machine had.

torchrun --nproc_per_node=2 --max-restarts=2 -m lab.faults.failing_run \
    --fault 0:1:reduce:5 --fault 1:0:save.rename:1:pause -- --config configs/quickstart.yaml

A fault is ATTEMPT:RANK:POINT:NUMBER:ACTION. When the launcher starts the job for the ATTEMPTth time (from 0), rank RANK
does ACTION (without it, kill) when it reaches POINT for the NUMBERth time, or, if POINT is "moment", NUMBER
milliseconds after it has begun to resume. An action is one of `ACTIONS`, or at POINT "step" TARGET.BIT, which flips a
bit of a gradient, a weight, a master weight or a moment: see lab/faults/flips.py. This script wraps the functions at
the points; the program itself has no code for faults.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pretrain_gpt
from gpt import trainer
from gpt.checkpoint import checkpoint, recovery
from gpt.model.transformer import GPT
from gpt.run_folder import files
from lab.faults.flips import TARGETS, flip
from zero.checkpoint import tensor_file, writer
from zero.core.buckets.bucket import ParamShard
from zero.core.buckets.gradients import GradientReducer
from zero.core.buckets.reductions import Reductions
from zero.optimizer import ZeroOptimizer

# name: (module or class, name of its function, "before" the function is called or "after" it has returned)
POINTS: dict[str, tuple[Any, str, str]] = {
    "forward": (GPT, "forward", "before"),
    "backward": (GradientReducer, "accept", "before"),
    "reduce": (Reductions, "launch", "after"),
    "update": (ZeroOptimizer, "_update", "before"),
    "publish": (ParamShard, "all_gather_updated", "before"),
    "log": (files, "append_records", "before"),
    "save.begin": (writer, "write_tensors", "before"),
    "save.middle": (tensor_file, "_chunks", "before"),
    "save.written": (writer, "write_tensors", "after"),
    "save.layout": (writer, "write_json", "before"),
    "save.rename": (writer, "flush_folder", "after"),
    "save.latest": (checkpoint, "replace_text", "before"),
    "save.keep": (checkpoint, "delete_old", "before"),
    "save.remove": (shutil, "rmtree", "before"),
}
# The points that only rank 0 reaches.
FIRST_RANK_ONLY = {"log", "save.layout", "save.rename", "save.latest", "save.keep", "save.remove"}
MOMENT, STEP = "moment", "step"
PAUSE_SECONDS = 2
FILE_BYTES = 1000  # that any file may have once a rank's disk is "full"


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def pause() -> None:
    """Stop this process, and let it continue after some seconds."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {os.getpid()}"], start_new_session=True)
    send(signal.SIGSTOP)


def fill_disk() -> None:
    """Make every write beyond the first bytes of a file fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": partial(send, signal.SIGKILL),
    "usr1": partial(send, signal.SIGUSR1),
    "term": partial(send, signal.SIGTERM),
    "stop": partial(send, signal.SIGSTOP),
    "pause": pause,
    "full": fill_disk,
}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, in one start of the job."""

    attempt: int
    rank: int
    point: str
    number: int
    action: str = "kill"

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Return the fault of a description. Raises ValueError or ArgumentTypeError."""
        attempt, rank, point, number, *action = text.split(":")
        fault = cls(int(attempt), int(rank), point, int(number), *action)
        if fault.point not in (*POINTS, MOMENT, STEP):
            raise ArgumentTypeError(f"{point} is not a point; choose one of {', '.join([*POINTS, MOMENT, STEP])}")
        target, _, bit = fault.action.partition(".")
        is_known = target in TARGETS and bit.isdigit() if point == STEP else fault.action in ACTIONS
        if not is_known:
            choices = [f"{target}.BIT" for target in TARGETS] if point == STEP else ACTIONS
            raise ArgumentTypeError(f"{fault.action} is no action at {point}; choose one of {', '.join(choices)}")
        return fault

    def __str__(self) -> str:
        return f"{self.attempt}:{self.rank}:{self.point}:{self.number}:{self.action}"

    def arm(self) -> None:
        """Wrap the function at the point, so that this process does the action there."""
        target, _, bit = self.action.partition(".")
        if bit:
            wrap(trainer, "train_step", lambda step: flip(step, self.number, target, int(bit), self.rank))
            return
        action = ACTIONS[self.action]
        if self.point == MOMENT:
            timer = threading.Timer(self.number / 1000, action)
            timer.daemon = True
            wrap(recovery.Recovery, "resume", lambda function: before(function, timer.start))
            return
        owner, name, when = POINTS[self.point]
        num_calls = count(1)

        def act_when_due() -> None:
            if next(num_calls) == self.number:
                action()

        wrap(owner, name, lambda function: (before if when == "before" else after)(function, act_when_due))


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def before(function: Callable, action: Callable[[], None]) -> Callable:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return wrapped


def after(function: Callable, action: Callable[[], None]) -> Callable:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        action()
        return result

    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    options, arguments = parser.parse_known_args()
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    for fault in options.fault:
        if (fault.attempt, fault.rank) == (attempt, rank):
            fault.arm()
    sys.argv[1:] = [argument for argument in arguments if argument != "--"]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
