"""Compare predicted with measured step times of twelve configurations of a small GPT, on two ranks of this machine.

    python -m lab.bench.predicted                      # writes docs/results/predicted.md
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.train_step import train_step
from lab.dryrun.dry_run import dry_run
from lab.dryrun.projection import project_recording
from lab.measure.cluster import ClusterSpec
from parallel.world import World, start_world, stop_world

NUM_RANKS = 2
FOLDER = Path("runs/predicted")
MODEL = (
    "--config configs/quickstart.yaml --model.num_layers 4 --model.hidden_size 256 --model.num_heads 4 "
    "--train.micro_batch_size 4 --train.global_batch_size 8"
)
CONFIGURATIONS = {
    "stage 0": "--zero.stage 0",
    "stage 1": "--zero.stage 1",
    "stage 2": "--zero.stage 2",
    "stage 3": "--zero.stage 3",
    "stage 2, 4 micro-batches": "--zero.stage 2 --train.global_batch_size 32",
    "stage 3, 2 micro-batches": "--zero.stage 3 --train.global_batch_size 16",
    "stage 1, bf16": "--zero.stage 1 --train.precision bf16",
    "stage 2, blocks recomputed": "--zero.stage 2 --activations.store keep",
    "stage 1, attention recomputed": "--zero.stage 1 --activations.store selective",
    "tensor size 2": "--parallel.tensor_size 2 --train.global_batch_size 4",
    "tensor size 2, sequence parallel": "--parallel.tensor_size 2 --parallel.sequence_parallel true "
    "--train.global_batch_size 8",
    "stage 2, compiled": "--zero.stage 2 --train.compile blocks",
}
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


def settings_of(name: str, *options: str) -> Settings:
    """Return the settings of a configuration."""
    return parse_settings([*f"{MODEL} {CONFIGURATIONS[name]}".split(), *options])


def prepare(name: str, world: World) -> Callable[[], object]:
    """Build a configuration and return its step."""
    settings = settings_of(name)
    mesh = build_mesh(settings, world)
    state = build(settings, mesh, world.device)
    generator = torch.Generator().manual_seed(mesh.data.rank)
    shape = settings.train.micro_batch_size, settings.model.seq_length + 1
    batches = [
        torch.randint(settings.model.vocab_size, shape, generator=generator)
        for _ in range(settings.train.num_micro_batches(mesh.num_batch_ranks))
    ]
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
            times[name].append(timed(steps[name]))
    if world.is_first:
        output.write_text(json.dumps(times))
    stop_world()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank, and its processor time on this one."""
    step()  # another configuration has filled the caches
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    cpu_seconds = time.process_time() - cpu_start
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), cpu_seconds


def predict(name: str, cluster: Path) -> float:
    """Return the seconds of a step that a dry run and the cluster file project."""
    imitated = f"--dry_run.world_size={NUM_RANKS}", "--dry_run.backend=gloo", f"--dry_run.cluster={cluster}"
    return project_recording(dry_run(settings_of(name, *imitated)), ClusterSpec.load(cluster)).seconds


def launch(*words: str) -> None:
    """Run a module on two ranks of one thread each. Raise CalledProcessError if it fails."""
    # The numbers of a launcher that has started this program are not those of its own ranks.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NUM_RANKS}", "-m"]
    subprocess.run([*torchrun, *words], env=environment, check=True)


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| configuration | predicted | measured | quartiles | error | processor time |", "|---" * 6 + "|"]
    for row in rows:
        lines.append(
            f"| {row.name} | {1e3 * row.predicted:.0f} | {1e3 * row.measured:.0f} | {1e3 * row.low:.0f} to "
            f"{1e3 * row.high:.0f} | {row.error:+.0%} | {1e3 * row.cpu_seconds:.0f} |"
        )
    return "\n".join(lines)


def page(rows: list[Row], num_rounds: int, load: float) -> str:
    """Return the page of the results."""
    errors = [abs(row.error) for row in rows]
    settings = settings_of("stage 0")
    model, train = settings.model, settings.train
    return f"""# Predicted and measured step times

A preflight measured this machine without a model, and dry runs then predicted a step of {len(rows)} configurations of a
small GPT: the median error is {statistics.median(errors):.0%}, the largest {max(errors):.0%}.

```bash
python -m lab.bench.predicted          # writes this page
```

All times are milliseconds of a step:

{table(rows)}

*Measured* is the median of {num_rounds} rounds; in each round every configuration has one measured step, in an order
that rotates. *Error* is that of the prediction. *Processor time* is that of all threads of rank 0. A prediction leaves
out the time that Python spends on the program beyond that of a kernel's launch. The times of collectives contain waits
for the slower rank, as they were measured behind one computation; with a tensor axis such waits are more frequent.

Measured on {date.today()}: {os.cpu_count()} CPU cores, torch {torch.__version__}, gloo over loopback, {NUM_RANKS}
ranks of one thread, load {load:.1f} at the start. GPT with {model.num_layers} layers x {model.hidden_size}, vocabulary
{model.vocab_size}, sequence {model.seq_length}, micro-batch {train.micro_batch_size}, AdamW; fp32 unless stated.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each configuration")
    parser.add_argument("--output", type=Path, default=Path("docs/results/predicted.md"), help="the page to write")
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        measure_steps(options.rounds, options.as_rank)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    load, cluster, times = os.getloadavg()[0], FOLDER / "cluster.yaml", FOLDER / "times.json"
    launch("lab.measure", "--write", str(cluster), "--name", "this machine")
    launch("lab.bench.predicted", "--rounds", str(options.rounds), "--as_rank", str(times))
    rows = []
    for name, measured in json.loads(times.read_text()).items():
        seconds, cpu = zip(*measured, strict=True)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        rows.append(Row(name, predict(name, cluster), median, low, high, statistics.median(cpu)))
    text = page(rows, options.rounds, load)
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
