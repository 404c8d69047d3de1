"""Compare training on all ranks with training in one process on the same device.

    python -m parallel.launch --standalone --nproc-per-node 2 -m lab.acceptance.equality --output equality.jsonl

Each rank first trains a small GPT alone, then all ranks train it with each case of lab/acceptance/cases.py: once as
it is, and once delayed (lab/acceptance/delays.py). The file gets a line for each comparison,
which says if it passed.

Parameters and sums are fp32, and TF32 is off. A sum of n terms in another order differs by about sqrt(n) roundings of
6e-8 each, so losses and norms may differ by 2e-5 of their value, with a margin for what a few steps add. Adam's eps is
large, so that it does not turn the rounding of a gradient near zero into a full step. A step changes the norm by more
than 1e-2 of its value, and so does a parameter that is a step old.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt.builder.train_state import build, build_mesh
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.train_step import mean_over, train_step
from lab.acceptance.cases import Case, cases_for
from lab.acceptance.child import as_options
from lab.acceptance.delays import Delays
from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World, exit_as_rank, start_world

NUM_STEPS, NUM_MICRO_BATCHES, SEQUENCES_AT_ONCE = 3, 2, 8  # the last over all data-parallel ranks
TOLERANCE = 2e-5
ALONE = Case(stage=0, num_shard_groups=1, tensor_size=1, store="none", offload="accelerator")
Losses = list[float]  # the loss and the gradient norm of every step, in turn


@dataclass(frozen=True)
class Comparison:
    """One line of the output: the largest relative difference of a case."""

    ranks: int
    what: str
    is_delayed: bool
    difference: float
    passed: bool


def settings_of(case: Case, num_ranks: int) -> Settings:
    """Return the settings of the case. A bucket holds a fraction of a block, so that every rank has several."""
    options = {
        "config": Path(__file__).with_suffix(".yaml"),
        "parallel.tensor_size": case.tensor_size,
        "parallel.shard_size": case.shard_size(num_ranks) or "null",
        "zero.stage": case.stage,
        "offload.mode": case.offload,
        "activations.store": case.store,
        "train.micro_batch_size": SEQUENCES_AT_ONCE * case.tensor_size // num_ranks,
        "train.global_batch_size": SEQUENCES_AT_ONCE * NUM_MICRO_BATCHES,
    }
    return parse_settings(as_options(options))


def train(settings: Settings, mesh: Mesh, device: torch.device) -> Losses:
    """Train on the rank's sequences of a fixed batch, and return the losses of all ranks."""
    state = build(settings, mesh, device)
    found: list[Tensor] = []
    shape = NUM_MICRO_BATCHES, SEQUENCES_AT_ONCE, settings.model.seq_length + 1
    batch = torch.randint(settings.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    own = batch.chunk(mesh.data.size, dim=1)[mesh.data.rank].to(device)
    for _ in range(NUM_STEPS):
        # The losses are read after the last step: a wait for the device in between would hide a missing one.
        found += train_step(state.model, state.optimizer, list(own), mesh)
    return [mean_over(mesh, loss) for loss in found]


def train_alone(device: torch.device) -> Losses:
    log = CommLog()
    mesh = Mesh(Axis.trivial("data", log), Axis.trivial("tensor", log), log)
    return train(settings_of(ALONE, 1), mesh, device)


def relative_difference(found: Losses, expected: Losses) -> float:
    """Return the largest difference relative to the expected value; infinity if one is not a number."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return max(d if d == d else float("inf") for d in differences)


def compare(world: World, delays: Delays | None, cases: list[Case], report: Callable[[Comparison], None]) -> None:
    """Run all comparisons and report each, on every rank alike; with `delays` each of them twice."""
    meshes: dict[tuple[int, int], Mesh] = {}  # a communicator takes a while to make, and cases share them

    def mesh_of(case: Case) -> Mesh:
        key = case.tensor_size, case.num_shard_groups
        if key not in meshes:
            meshes[key] = build_mesh(settings_of(case, world.size), world)
        return meshes[key]

    expected = train_alone(world.device)
    for case in cases:
        for queued in (None, delays) if delays else (None,):
            with queued.inserted() if queued else nullcontext():
                found = train(settings_of(case, world.size), mesh_of(case), world.device)
            difference = relative_difference(found, expected)
            report(Comparison(world.size, str(case), queued is not None, difference, difference <= TOLERANCE))
    if delays and world.size > 1 and not (delays.num_collectives and delays.num_copies):
        raise ConfigError(
            f"{delays.num_collectives} collectives and {delays.num_copies} copies were delayed, which must not be 0; "
            "make lab/acceptance/delays.py wrap those of this version"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="file to which a line is added for each comparison")
    parser.add_argument("--cases", type=int, help="run the first so many cases only")
    parser.add_argument("--without_delays", action="store_true", help="run every case once")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    world = start_world()

    def report(comparison: Comparison) -> None:
        if world.is_first:
            print(comparison, flush=True)
            with options.output.open("a") as file:
                file.write(json.dumps(vars(comparison)) + "\n")

    with exit_as_rank():
        delays = None if options.without_delays else Delays(world)
        compare(world, delays, cases_for(world.size)[: options.cases], report)


if __name__ == "__main__":
    main()
