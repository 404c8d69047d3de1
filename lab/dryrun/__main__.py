"""A dry run: a few steps of one rank of any world, on tensors without values. `pretrain_gpt.py` starts it.

python -m lab.dryrun --config configs/quickstart.yaml --dry_run.world_size 64      the options are those of a run
"""

import signal
import sys

from data.errors import DataError
from gpt.monitor.console import RunConsole
from gpt.settings.parser import parse_settings
from lab.dryrun.report import run_and_report
from parallel.world import exit_as_rank, rank_from_environment


def main(words: list[str]) -> None:
    console = RunConsole(is_quiet=rank_from_environment() > 0)
    with exit_as_rank(DataError):
        run_and_report(parse_settings(words, show=console.show), console)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback, there is nothing to save
    main(sys.argv[1:])
