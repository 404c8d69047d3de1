"""The search of largest.sh for the largest number of layers that trains.

The outcome of a run is read from its metrics.jsonl, not from its exit code. So all nodes that share the folder decide
alike, and an interrupted search continues from the runs that have ended.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpt.run_folder.files import METRICS
from parallel.errors import ConfigError, exit_on_config_error

STEPS = 3  # all memory has been allocated after the first
RUNS = Path("runs/paper/largest")


def largest(fits: Callable[[int], bool], first: int, step: int) -> int:
    """Return the largest number first + n * step (n may be negative) that fits; 0 if none does.

    Assumes that every number below one that fits also fits. Strides away from `first` double until `low` fits and
    `high` does not; then bisection follows.
    """
    none = (first % step or step) - step  # the largest first + n * step that is not above 0: counts as fitting
    low, high, stride = first, first, step
    if fits(first):
        while fits(high := low + stride):
            low, stride = high, 2 * stride
    else:
        while (low := max(none, high - stride)) > none and not fits(low):
            high, stride = low, 2 * stride
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 0)


def outcome(folder: Path) -> bool | None:
    """Return True if the run in `folder` trained to its end, False if it ran out of memory, otherwise None."""
    metrics = folder / METRICS
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if any(record.get("out_of_memory") for record in records):
        return False
    return True if any(record["step"] == STEPS for record in records) else None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/paper/largest.sh", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="an experiment, such as configs/paper/figure6/140b-c4-400.yaml")
    parser.add_argument("first", type=int, help="layers to begin with")
    parser.add_argument("--step", type=int, default=1, help="search to within this many layers")
    parser.add_argument(
        "--launch", default="scripts/paper/launch.sh", help="the command that starts a run of a configuration"
    )
    options, others = parser.parse_known_args(arguments)
    if options.first < 1 or options.step < 1:
        parser.exit(2, f"error: {options.first} layers or --step={options.step} is below 1; choose 1 or more\n")

    def fits(num_layers: int) -> bool:
        folder = RUNS / f"{Path(options.config).stem}-{num_layers}"
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

    with exit_on_config_error():
        print(f"{largest(fits, options.first, options.step)} layers are the most that fit")


if __name__ == "__main__":
    main(sys.argv[1:])
