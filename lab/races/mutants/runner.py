"""Runs tests in a process that is forked from one which has imported torch and others, and nothing of the project.

Importing these takes longer than most tests. Ranks are forked from the process of the tests for the same reason.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

PRELOADED = [
    *("torch", "torch.distributed", "torch._dynamo", "transformers", "datasets"),
    *("pytest", "xdist.plugin", "hypothesis", "anyio.pytest_plugin", "tensorboard.compat.proto.event_pb2"),
]
OWN = {"data", "gpt", "lab", "parallel", "pretrain_gpt", "tests", "zero"}


def run_tests(tree: Path, tests: list[str], limit_seconds: float) -> str:
    """Run tests of a tree until one fails; return what failed, "" if nothing did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile() as output:
        process = context.Process(target=_run, args=(str(tree), tests, output.name))
        process.start()
        process.join(limit_seconds)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.join()
            return f"no end after {limit_seconds:.0f} s"
        return "" if process.exitcode == 0 else _failure(Path(output.name).read_text(), process.exitcode)


def _run(tree: str, tests: list[str], output: str) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # what was imported before the fork: collections need not visit it
    sys.dont_write_bytecode = False  # in the copy of the tree, where most modules stay as they are
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    here = os.getcwd()
    os.chdir(tree)
    sys.path[:] = [tree, *(path for path in sys.path if path not in ("", here))]
    for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
        del sys.modules[name]
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: _Forking(fork)  # type: ignore[assignment]
    import pytest

    code = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *tests])
    sys.stdout.flush()
    os._exit(code)


class _Forking:
    """A context of multiprocessing that forks, whatever it is asked for."""

    def __init__(self, fork: multiprocessing.context.BaseContext):
        self._fork = fork
        self.set_forkserver_preload = partial(lambda names: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fork, name)


def _failure(output: str, code: int) -> str:
    """Return the path and the name of the test that failed, and the last line of its error."""
    lines = output.splitlines()
    test = next((line.partition(" ")[2].split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    error = next((line[2:].strip() for line in reversed(lines) if line.startswith("E  ")), "")
    return f"{test or f'exit code {code}'}: {error}"
