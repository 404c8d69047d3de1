"""The search of largest.sh for the largest number of layers that trains.

The outcome of a run is read from its metrics.jsonl, not from its exit code. So all nodes that share the folder decide
alike, and an interrupted search continues from the runs that have ended: those of the same settings and nodes.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from gpt.run_folder.files import METRICS, read_steps
from gpt.settings.parser import parse_settings
from lab.planner.search import largest
from parallel.validation.errors import ConfigError, exit_on_config_error

STEPS = 3  # all memory has been allocated after the first
RUNS = Path("runs/paper/largest")


def outcome(folder: Path) -> bool | None:
    """Return True if the run in `folder` trained to its end, False if it ran out of memory, otherwise None."""
    if (folder / METRICS).exists() and '"out_of_memory": true' in (folder / METRICS).read_text():
        return False
    return True if any(record["step"] == STEPS for record in read_steps(folder)) else None


def folder_of(config: str, others: list[str], nodes: str) -> Path:
    """Return the folder for runs of one experiment. Raise ConfigError if its settings are wrong."""
    settings = parse_settings(["--config", config, *others])
    digest = hashlib.sha256(f"{settings} {nodes}".encode()).hexdigest()
    return RUNS / f"{Path(config).stem}-{digest[:8]}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/paper/largest.sh", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="an experiment, such as configs/paper/figure6/140b-c4-400.yaml")
    parser.add_argument("first", type=int, help="layers to begin with")
    parser.add_argument("--step", type=int, default=1, help="search to within this many layers")
    parser.add_argument(
        "--launch", default="scripts/paper/launch.sh", help="the command that starts a run of a configuration"
    )
    parser.add_argument("--nodes", default="", help="what the command is told of nodes: their number, and their ranks")
    options, others = parser.parse_known_args(arguments)
    if options.first < 1 or options.step < 1:
        parser.exit(2, f"error: {options.first} layers or --step={options.step} is below 1; choose 1 or more\n")

    folders = folder_of(options.config, others, options.nodes)

    def fits(num_layers: int) -> bool:
        folder = folders / str(num_layers)
        if outcome(folder) is None:
            layers = ["--model.num_layers", str(num_layers), "--train.steps", str(STEPS), "--run.dir", str(folder)]
            subprocess.run([options.launch, options.config, "--train.log_every", "1", *others, *layers], check=False)
        found = outcome(folder)
        if found is None:
            raise ConfigError(
                f"the run of {num_layers} layers ended neither trained nor out of memory; see {folder}, try again"
            )
        print(f"{num_layers} layers {'fit' if found else 'do not fit'}", flush=True)
        return found

    print(f"{largest(fits, options.first, options.step)} layers are the most that fit")


if __name__ == "__main__":
    with exit_on_config_error(OSError):
        main(sys.argv[1:])
