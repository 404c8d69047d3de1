"""The bytes of stage 3 inside nodes and between them, and the time that a slow link takes: flat, groups, two levels.

    python -m lab.bench.two_levels --output runs/two_levels.json [--limit MBIT_PER_SECOND]     # as root

Two nodes of two ranks are network namespaces of one machine (lab/faults/testbed.py). In each of them the kernel counts
what is sent inside the node, by `lo`, and to the other one, by `e0`: headers, barriers and the norm included.
"""

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.faults.testbed import Node, joined_nodes, launch_on, testbed_problem
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


def measure(nodes: list[Node], num_steps: int, micro_batches: tuple[int, ...] = MICRO_BATCHES) -> list[dict]:
    """Return a row for each layout and number of micro-batches."""
    own = ["--steps", str(num_steps), "--micro_batches", *map(str, micro_batches)]
    return json.loads(launch_on(nodes, RANKS_OF_A_NODE, __spec__.name, *own))


def measure_rank(num_steps: int, micro_batches: list[int]) -> None:
    """Measure as one of the ranks; the first one prints the rows."""
    dist.init_process_group("gloo")
    rows = [measure_layout(name, num, num_steps) for name in LAYOUTS for num in micro_batches]
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def measure_layout(name: str, num_micro_batches: int, num_steps: int) -> dict:
    """Return the bytes that a rank of the first node sends in a step, the formula's, and the seconds: medians."""
    shard_size, config = LAYOUTS[name]
    mesh = Mesh.create(tensor_size=1, shard_size=shard_size)
    model = ZeroDataParallel(Chain(), mesh.data, config)
    optimizer, x = ZeroOptimizer(model, torch.optim.AdamW, fused=True), torch.ones(1, WIDTH, dtype=torch.bfloat16)
    readings = []
    for _ in range(NUM_WARM_UP + num_steps + 1):
        mesh.barrier()  # before and after each reading. What a step leaves for the next one to wait for counts there
        readings.append((*bytes_sent(), time.perf_counter()))
        mesh.barrier()
        for _ in range(num_micro_batches - 1):
            with model.accumulate():
                model(x).backward()
        model(x).backward()
        optimizer.step()
    steps = [[b - a for a, b in zip(*two, strict=True)] for two in pairwise(readings[NUM_WARM_UP:])]
    inside, between, seconds = map(median, zip(*steps, strict=True))
    found = {"layout": name, "micro_batches": num_micro_batches, "formula": expected_bytes(model, num_micro_batches)}
    return found | {"inside": inside / RANKS_OF_A_NODE, "between": between / RANKS_OF_A_NODE, "seconds": seconds}


def expected_bytes(model: ZeroDataParallel, num_micro_batches: int) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step inside its node and between nodes."""
    of_units = [flat.layout.numel * flat.full.element_size() for flat in model.flats]
    sizes = model.levels.inner.size, model.levels.outer.size
    inside, between = axis_bytes(model.config.policy, sum(of_units), sizes, num_micro_batches, kept_bytes=of_units[-1])
    if sizes[1] > 1:
        return inside, between
    share = (RANKS_OF_A_NODE - 1) / (NUM_RANKS - 1)  # of the peers, to each of which gloo's ranks send as much
    return inside * share, inside * (1 - share)


def bytes_sent() -> tuple[int, int]:
    """Return the bytes that the ranks of this node have sent to each other, and to the other node."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {name.strip(): int(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines)}
    return sent["lo"], sent["e0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--limit", type=float, help="limit of the link in Mbit/s, for a second measurement")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=MICRO_BATCHES)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure_rank(options.steps, options.micro_batches)
        return
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    found = {}
    for limit in (None, options.limit) if options.limit else (None,):
        with joined_nodes(mbit_per_second=limit) as nodes:
            found[str(limit)] = measure(nodes, options.steps, options.micro_batches)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
