"""Compare predicted with measured step times of twelve configurations of a small GPT, on two ranks of this machine.

    python -m lab.bench.predicted                      # writes the figures of docs/results/predicted.md
    python -m lab.bench.predicted --rounds 2 --output runs/predicted/page.md

It takes about five minutes on two idle cores. Three parts run after each other: a preflight of two ranks, which writes
the cluster file runs/predicted/cluster.yaml; the steps of all configurations, in rounds of which each has one measured
step of every configuration; and the dry runs, which know the cluster file and not the measured times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.train_step import train_step
from lab.bench.step_time import timed
from lab.dryrun.dry_run import dry_run
from lab.dryrun.projection import project_recording
from lab.measure.cluster import ClusterSpec
from lab.pages.markdown import table, with_blocks
from parallel.world import World, start_world, stop_world

NUM_RANKS = 2
PAGE = Path("docs/results/predicted.md")
FOLDER = Path("runs/predicted")
FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CONFIGURATIONS: dict[str, str] = FOUND["configurations"]  # {name: options}
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Row:
    """The times of a step of one configuration, in seconds. `cpu_seconds` is the processor time of a rank."""

    name: str
    predicted: float
    measured: float
    low: float  # quartiles of the measured times
    high: float
    cpu_seconds: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def cells(self) -> list[str]:
        predicted, measured, cpu = (
            f"{1e3 * seconds:.0f}" for seconds in (self.predicted, self.measured, self.cpu_seconds)
        )
        quartiles = f"{1e3 * self.low:.0f} to {1e3 * self.high:.0f}"
        return [self.name, predicted, measured, quartiles, f"{self.error:+.0%}", cpu]


def settings_of(name: str, *options: str) -> Settings:
    return parse_settings([*f"{FOUND['model']} {CONFIGURATIONS[name]}".split(), *options])


def prepare(name: str, world: World) -> Callable[[], object]:
    """Build a configuration and return its step."""
    settings = settings_of(name)
    mesh = build_mesh(settings, world)
    state = build(settings, mesh, world.device)
    generator = torch.Generator().manual_seed(mesh.data.rank)
    num_micro_batches = settings.train.num_micro_batches(mesh.num_batch_ranks)
    shape = num_micro_batches, settings.train.micro_batch_size, settings.model.seq_length + 1
    batches = list(torch.randint(settings.model.vocab_size, shape, generator=generator))
    return lambda: train_step(state.model, state.optimizer, batches, mesh)


def measure_steps(num_rounds: int, output: Path) -> None:
    """Measure the steps of all configurations, as one of the ranks; the first one writes them."""
    world = start_world()
    steps = {name: prepare(name, world) for name in CONFIGURATIONS}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(num_rounds):
        names = list(steps)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            steps[name]()  # another configuration has filled the caches
            dist.barrier()
            times[name].append(timed(steps[name], world.device))
    if world.is_first:
        output.write_text(json.dumps(times))
    stop_world()


def row_of(name: str, measured: list[tuple[float, float]], cluster: Path) -> Row:
    """Return the row of a configuration, with the seconds that a dry run and the cluster file project."""
    imitated = f"--dry_run.world_size={NUM_RANKS}", "--dry_run.backend=gloo", f"--dry_run.cluster={cluster}"
    predicted = project_recording(dry_run(settings_of(name, *imitated)), ClusterSpec.load(cluster)).seconds
    seconds, cpu = zip(*measured, strict=True)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Row(name, predicted, median, low, high, statistics.median(cpu))


def launch(*words: str) -> None:
    """Run a module on two ranks of one thread each. Raise CalledProcessError if it fails."""
    # The numbers of a launcher that has started this program are not those of its own ranks.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}", "-m"]
    subprocess.run([*torchrun, *words], env=environment, check=True)


def page(rows: list[Row], num_rounds: int, load: float) -> str:
    errors, model = [abs(row.error) for row in rows], settings_of("stage 0").model
    headings = "configuration", "predicted", "measured", "quartiles", "error", "processor time"
    lines = [
        f"Of {len(rows)} configurations, the median error is {statistics.median(errors):.0%}, the largest "
        f"{max(errors):.0%}. All times are milliseconds of a step, *measured* is the median of {num_rounds} rounds:\n",
        *table(headings, (row.cells() for row in rows)),
        f"\nMeasured on {date.today()}: {os.cpu_count()} CPU cores, torch {torch.__version__}, gloo over loopback, "
        f"{NUM_RANKS} ranks of one thread, load {load:.1f}\nat the start. GPT with {model.num_layers} layers x "
        f"{model.hidden_size}, vocabulary {model.vocab_size}, sequence {model.seq_length}, AdamW; fp32 unless stated.",
    ]
    return with_blocks(PAGE.read_text(), {"times": lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each configuration")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure_steps(options.rounds, options.as_rank)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    load, cluster, times = os.getloadavg()[0], FOLDER / "cluster.yaml", FOLDER / "times.json"
    launch("lab.measure", "--write", str(cluster), "--name", "this machine")
    launch("lab.bench.predicted", "--rounds", str(options.rounds), "--as_rank", str(times))
    rows = [row_of(name, measured, cluster) for name, measured in json.loads(times.read_text()).items()]
    text = page(rows, options.rounds, load)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
