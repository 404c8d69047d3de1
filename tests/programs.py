"""Programs, run in processes of their own or on ranks of the tests, and a full disk for them."""

import importlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from tests.ranks import start_process
from tests.source_files import ROOT

HANG_SECONDS = 300  # after which a hang ends; less than `run.hang_seconds`


def run_python(*words: str, folder: Path = ROOT, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, in a process of its own, and return its outcome. None unsets a variable."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )


def run_program(*words: str) -> None:
    """Run a program, given as words for torchrun, on a rank."""
    module, *arguments = words[1:] if words[0] == "-m" else [words[0].removesuffix(".py"), *words[1:]]
    with mock.patch.object(sys, "argv", [module, *arguments]):
        importlib.import_module(module).main()


def start_forked(said: Path, function: Callable[..., None], *args: object, **environment: str) -> BaseProcess:
    """Start a function, such as `run_program`, in a process of its own that need not import torch again.

    What it prints goes to the file `said`.
    """
    return start_process("forkserver", run_forked, said, environment, function, *args)


def run_forked(said: Path, environment: dict[str, str], function: Callable[..., None], *args: object) -> None:
    with said.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    function(*args)


def wait_for_end(process: BaseProcess) -> int | None:
    """Return the exit code of a process, or None if it hangs."""
    process.join(HANG_SECONDS)
    return process.exitcode


def wait_until(holds: Callable[[], bool]) -> None:
    """Return as soon as a condition holds; it fails the test if it never does."""
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what goes beyond, as a full disk does: it takes a part of a write, and refuses the next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
