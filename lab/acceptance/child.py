"""A child process with a log file and a time limit. When it has to end, all of its descendants end with it."""

import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 10.0  # torchrun gets this long to end its ranks
# A line of a log that says what went wrong, without the prefix that torch puts before it.
REASON = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:error: |CSAN detected |losses differ |[\w.]*(?:Error|Exception)\b).*)")


def run_child(command: list[str], log: Path, limit_seconds: float, environment: dict[str, str]) -> str:
    """Run the command in the repository root. Return one line about what went wrong, empty if the exit code is 0.

    KeyboardInterrupt ends the child first and goes on.
    """
    with log.open("w") as file:
        file.write(f"+ {' '.join(command)}\n")
        file.flush()
        # A session of its own: Ctrl-C in the terminal reaches this process only, which then ends the child in order.
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return f"did not end within {limit_seconds:.0f} s and was stopped; see {log}"
        finally:
            _stop(child)
    return f"{_reason(log)} (exit code {code}; see {log})" if code else ""


def _reason(log: Path) -> str:
    """Return the first line of the log that names an error, which is the cause of those after it."""
    lines = log.read_text(errors="replace").splitlines()
    found = (match.group(1).strip() for line in lines if (match := REASON.match(line)))
    return next(found, lines[-1].strip() if len(lines) > 1 else "no output")[:300]


def _stop(child: subprocess.Popen) -> None:
    """End the child if it still runs, and everything that it has started, such as the ranks of torchrun."""
    if child.poll() is not None:
        return
    others = descendants(child.pid)  # before it ends: then they would have another parent
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=GRACE_SECONDS)
    kill_all([child.pid, *others])
    child.wait()


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` has started, directly or not."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # after the name, which may contain anything
            children[int(fields[1])].append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


def as_options(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
