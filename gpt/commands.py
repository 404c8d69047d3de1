"""The console commands of an installed project; each runs a module as `python -m` does."""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# The arguments are the folder of the code, which is found wherever the process was started, a module and its arguments.
RUN_MODULE = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def _command(module: str) -> Callable[[], None]:
    """Return a function without arguments that runs a module with those of the command line."""

    def run() -> None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return run


# pyproject.toml gives each its name: `zero-gpt-prepare` and so on.
pretrain = _command("pretrain_gpt")
prepare = _command("data.prepare")
check = _command("data.check")
plan = _command("lab.planner.plan")
preflight = _command("gpt.preflight")
evaluate = _command("gpt.evaluate")
export = _command("gpt.checkpoint.export")
compare = _command("gpt.monitor.compare")
collectives = _command("lab.dryrun.collectives")
launch = _command("parallel.launch")


def replace_process(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module with `arguments` in place of this process, with its pid, environment and standard streams."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", RUN_MODULE, str(Path(__file__).parents[1]), module, *arguments])
