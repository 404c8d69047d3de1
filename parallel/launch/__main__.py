"""A wrapper of torchrun that exits with the code of the rank that failed first: torchrun's own exit code is always 1.

python -m parallel.launch --nnodes 2 --nproc-per-node 8 ... pretrain_gpt.py ...      every option is torchrun's
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from parallel.ending import EXIT_LOST
from parallel.process_defaults import raise_file_limit
from parallel.stopping import take_warnings

# Of ranks that were asked to stop, for their last checkpoint; torchrun's own 30 s are too few for a large model.
SHUTDOWN_OPTION, SECONDS_TO_STOP = "--shutdown-timeout", 600


def main(arguments: list[str]) -> int:
    """Run torchrun and return the exit code: 128 + the number of the signal if a rank was killed, as in a shell."""
    if SHUTDOWN_OPTION in run.get_args_parser().format_help():  # not in older versions
        arguments = [f"{SHUTDOWN_OPTION}={SECONDS_TO_STOP}", *arguments]
    take_warnings(pass_on)
    raise_file_limit()  # the agent of the first node serves the store of all ranks
    try:
        run.main(arguments)
    except ChildFailedError as error:
        # The reason before its consequences: a rank ends with EXIT_LOST if others hang or were lost.
        by_time = sorted(error.failures.items(), key=lambda found: (found[1].exitcode == EXIT_LOST, found[1].timestamp))
        rank, failure = by_time[0]
        why = f"failed first, with exit code {failure.exitcode}"
        if failure.exitcode == EXIT_LOST:
            why = f"was the first to end because a rank hangs or was lost, with exit code {EXIT_LOST}; see its error"
        sys.stderr.write(f"launch: rank {rank} {why}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        # torchrun has waited for the ranks, unless a second signal has interrupted it.
        pass_on(signal.SIGKILL)
        return 128 + error.sigval
    return 0


def pass_on(number: int) -> None:
    """Send a signal to the ranks; SIGKILL to all processes of each, which is the leader of its own process group."""
    for child in children():
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(child, number)


def children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
