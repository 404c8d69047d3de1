"""A run of pretrain_gpt.py that is killed on purpose, as if its machine had failed.

torchrun --nproc_per_node=2 --max-restarts=2 -m scripts.failing_run \
    --kill 0:1:reduce:5 --kill 1:0:save.rename:1 -- --config configs/quickstart.yaml

A kill is ATTEMPT:RANK:POINT:NUMBER. When the launcher starts the job for the ATTEMPTth time (from 0), rank RANK gets
SIGKILL when it reaches POINT for the NUMBERth time, or, if POINT is "moment", NUMBER milliseconds after it has begun
to resume. This script wraps the functions at the points; the program itself has no code for kills.
"""

import argparse
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pretrain_gpt
from gpt.checkpoint import recovery, saver
from gpt.model.transformer import GPT
from gpt.run_folder import files
from zero.bucket import ParamShard
from zero.gradients import GradientReducer
from zero.optimizer import ZeroOptimizer
from zero.state import tensor_file

# name: (module or class, name of its function, "before" the function is called or "after" it has returned)
POINTS: dict[str, tuple[Any, str, str]] = {
    "forward": (GPT, "forward", "before"),
    "backward": (GradientReducer, "accept", "before"),
    "reduce": (GradientReducer, "_launch", "after"),
    "update": (ZeroOptimizer, "_update", "before"),
    "publish": (ParamShard, "all_gather_updated", "before"),
    "log": (files, "append_records", "before"),
    "save.begin": (saver, "write_tensors", "before"),
    "save.middle": (tensor_file, "_chunks", "before"),
    "save.written": (saver, "write_tensors", "after"),
    "save.layout": (saver, "write_json", "before"),
    "save.rename": (saver, "flush_folder", "after"),
    "save.latest": (saver, "replace_text", "before"),
    "save.keep": (saver, "keep_newest", "before"),
    "save.remove": (shutil, "rmtree", "before"),
}
# The points that only rank 0 reaches.
FIRST_RANK_ONLY = {"log", "save.layout", "save.rename", "save.latest", "save.keep", "save.remove"}
MOMENT = "moment"


@dataclass(frozen=True)
class Kill:
    attempt: int
    rank: int
    point: str
    number: int

    @classmethod
    def parse(cls, text: str) -> "Kill":
        attempt, rank, point, number = text.split(":")
        if point not in POINTS and point != MOMENT:
            raise ValueError(f"{point} is not a point; choose one of {', '.join([*POINTS, MOMENT])}")
        return cls(int(attempt), int(rank), point, int(number))

    def __str__(self) -> str:
        return f"{self.attempt}:{self.rank}:{self.point}:{self.number}"

    def arm(self) -> None:
        """Wrap the function at the point, so that this process kills itself there."""
        if self.point == MOMENT:
            timer = threading.Timer(self.number / 1000, kill_this_process)
            timer.daemon = True
            wrap(recovery.Recovery, "resume", lambda function: before(function, timer.start))
            return
        owner, name, when = POINTS[self.point]
        num_calls = count(1)

        def kill_when_due() -> None:
            if next(num_calls) == self.number:
                kill_this_process()

        wrap(owner, name, lambda function: (before if when == "before" else after)(function, kill_when_due))


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Replace `owner`'s function `name` by what `wrapper` makes of it."""
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


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", type=Kill.parse, action="append", default=[])
    options, arguments = parser.parse_known_args()
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    for kill in options.kill:
        if (kill.attempt, kill.rank) == (attempt, rank):
            kill.arm()
    sys.argv[1:] = [argument for argument in arguments if argument != "--"]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
