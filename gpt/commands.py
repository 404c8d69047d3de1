"""The console commands of an installed project; each runs a module as `python -m` does."""

import runpy
from collections.abc import Callable


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
collectives = _command("gpt.monitor.collectives")
launch = _command("parallel.launch")
