"""The bytes of stage 3 inside nodes and between them, and the time that a slow link takes: flat, groups, two levels.

    python -m lab.bench.two_levels --output runs/two_levels.json [--limits MBIT_PER_SECOND ... --plot FILE]    # as root

Two nodes of two ranks are network namespaces of one machine (lab/faults/testbed.py). In each of them the kernel counts
what is sent inside the node, by `lo`, and to the other one, by `e0`: headers, barriers and the norm included.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.bench.rounds import bytes_sent
from lab.faults.testbed import Node, joined_nodes, launch_on, testbed_problem
from lab.pages.plots import plot
from parallel.mesh import Mesh
from zero.engine import ZeroDataParallel
from zero.formulas.traffic import axis_bytes
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig

LAYOUTS = {  # shard_size, settings
    "flat": (None, ZeroConfig(3)),
    "groups": (2, ZeroConfig(3)),
    "two levels": (2, ZeroConfig(3, optimizer_over="all")),
}
MICRO_BATCHES = 1, 4, 8
NUM_RANKS, RANKS_OF_A_NODE, NUM_BLOCKS, WIDTH = 4, 2, 8, 1024
NUM_WARM_UP = 3  # steps until the order of units is known on all ranks


class Chain(nn.Module):
    """Blocks of one matrix each: the computation is short, and nearly all of a step is communication."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(NUM_BLOCKS))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().mean()


def measure(nodes: list[Node], *options: str) -> list[dict]:
    """Return a row for each limit of the link, none first, each layout and each number of micro-batches."""
    named = json.dumps([asdict(node) for node in nodes])
    return json.loads(launch_on(nodes, RANKS_OF_A_NODE, __spec__.name, *options, "--nodes", named))


def measure_rank(options: argparse.Namespace) -> None:
    """Measure as one of the ranks; the first one limits the link and prints the rows."""
    dist.init_process_group("gloo")
    jobs = {name: Job(name, options.in_sequence) for name in LAYOUTS}
    rows = []
    for limit in (None, *options.limits):
        if limit is not None and dist.get_rank() == 0:
            for node in json.loads(options.nodes):
                Node(**node).limit(limit)
        for name, num in product(LAYOUTS, options.micro_batches):
            found = jobs[name].measure(num, options.steps)
            rows.append({"limit": limit, "layout": name, "micro_batches": num, **found})
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


class Job:
    """A model with its optimizer in one of the layouts, after steps in which its ranks learn the order of units."""

    def __init__(self, layout: str, in_sequence: bool):
        shard_size, config = LAYOUTS[layout]
        if in_sequence:
            config = replace(config, overlap=False, prefetch_numel=0)
        self._in_sequence = in_sequence
        self._mesh = Mesh.create(tensor_size=1, shard_size=shard_size)
        self._model = ZeroDataParallel(Chain(), self._mesh.data, config)
        self._optimizer = ZeroOptimizer(self._model, torch.optim.AdamW, fused=True)
        for _ in range(NUM_WARM_UP):
            self._step(1)

    def _step(self, num_micro_batches: int) -> None:
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        for _ in range(num_micro_batches - 1):
            with self._model.accumulate():
                self._model(x).backward()
        self._model(x).backward()
        self._optimizer.step()
        for bucket in self._model.buckets if self._in_sequence else ():
            bucket.params.wait_for_update()

    def measure(self, num_micro_batches: int, num_steps: int) -> dict:
        """Return the bytes that a rank of the first node sends in a step, the formula's, and the seconds: medians.

        What a step leaves for the next one to wait for counts there, so one step more runs before.
        """
        readings = []
        for _ in range(num_steps + 1):
            self._step(num_micro_batches)
            self._mesh.barrier()  # before and after each reading
            readings.append((bytes_sent("lo"), bytes_sent("e0"), time.perf_counter()))
            self._mesh.barrier()
        steps = [[b - a for a, b in zip(*two, strict=True)] for two in pairwise(readings)]
        inside, between, seconds = map(median, zip(*steps, strict=True))
        found = {"formula": expected_bytes(self._model, num_micro_batches), "seconds": seconds}
        return found | {"inside": inside / RANKS_OF_A_NODE, "between": between / RANKS_OF_A_NODE}


def expected_bytes(model: ZeroDataParallel, num_micro_batches: int) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step inside its node and between nodes."""
    of_units = [flat.layout.numel * flat.full.element_size() for flat in model.flats]
    sizes = model.levels.inner.size, model.levels.outer.size
    inside, between = axis_bytes(model.config.policy, sum(of_units), sizes, num_micro_batches, kept_bytes=of_units[-1])
    if sizes[1] > 1:
        return inside, between
    share = (RANKS_OF_A_NODE - 1) / (NUM_RANKS - 1)  # of the peers, to each of which gloo's ranks send as much
    return inside * share, inside * (1 - share)


def plot_lost(rows: Sequence[dict], path: Path) -> None:
    """Draw the seconds that each layout loses to a limited link over those of the formula's bytes on the link alone."""
    unlimited = {(row["layout"], row["micro_batches"]): row["seconds"] for row in rows if row["limit"] is None}
    label = {"xlabel": "link's time for the formula's bytes, s", "ylabel": "time lost, s"}
    with plot(path, size=(6, 4.5)) as (panel,):
        panel.set(xscale="log", yscale="log", **label)
        for layout in LAYOUTS:
            limited = [row for row in rows if row["limit"] is not None and row["layout"] == layout]
            of_link = [8e-6 * RANKS_OF_A_NODE * row["formula"][1] / row["limit"] for row in limited]
            lost = [row["seconds"] - unlimited[layout, row["micro_batches"]] for row in limited]
            panel.plot(of_link, lost, "o", label=layout)
        panel.axline((1, 1), (10, 10), color="gray", label="nothing hidden")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--limits", type=float, nargs="*", default=[], help="of the link, Mbit/s: measured one by one")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--in_sequence", action="store_true", help="wait for each message at once: nothing is hidden")
    parser.add_argument("--plot", type=Path, help="a picture of the time lost to limited links")
    parser.add_argument("--nodes", help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.nodes:
        measure_rank(options)
        return
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with joined_nodes() as nodes:
        rows = measure(nodes, *sys.argv[1:])
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot_lost(rows, options.plot)


if __name__ == "__main__":
    main()
