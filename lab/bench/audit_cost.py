"""Measures what audits cost: `torchrun --nproc_per_node=2 -m lab.bench.audit_cost --config configs/quickstart.yaml`.

In each round a step without audits, one that only compares states at rest, and one with an audit follow one another.
Other work on the machine changes the processor time less than the time, but it does not include waiting.
Arguments are settings of the run, whose data are not read; train.reproducible=layout is set.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from data.batches import BatchLoader
from gpt.audit import Auditor
from gpt.builder.train_state import build, build_mesh, num_adding_units, start_options
from gpt.monitor.node_map import find_nodes
from gpt.settings.parser import parse_settings
from gpt.train_step import train_step
from lab.bench.rounds import quartiles, ratios
from parallel.world import start_world, stop_world

NUM_ROUNDS = 30
WITHOUT, AT_REST, AUDIT = "without", "states at rest", "audit"


class RandomSamples:
    """Sequences of random tokens."""

    tokens_per_sample = 1.0

    def __init__(self, seq_length: int, vocab_size: int):
        self._seq_length, self._vocab_size = seq_length, vocab_size

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.random.default_rng(sample).integers(self._vocab_size, size=self._seq_length + 1)

    def place(self, sample: int) -> str:
        return f"sample {sample}"

    def build_cache(self, first_sample: int, num_samples: int) -> None:
        pass


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(["--train.reproducible=layout", *arguments])
    world = start_world(start_options(settings))
    mesh = build_mesh(settings, world)
    state = build(settings, mesh, world.device)
    loader = BatchLoader(
        RandomSamples(settings.model.seq_length, settings.model.vocab_size),
        micro_batch_size=settings.train.micro_batch_size,
        data_rank=mesh.batch_rank,
        data_size=mesh.num_batch_ranks,
        vocab_size=settings.model.vocab_size,
        num_units=num_adding_units(settings, mesh),
    )
    places = find_nodes(world)
    auditor, none = Auditor(2, state, loader, places), Auditor(0, state, loader, places)
    order = [("first", auditor), (AUDIT, auditor), (AT_REST, auditor), (WITHOUT, none)]  # the first one begins hashes
    num_samples = settings.train.global_batch_size
    seconds, of_cores = ({name: list[float]() for name, _ in order} for _ in range(2))
    plan = [(step * num_samples, num_samples) for step in range(1, len(order) * (NUM_ROUNDS + 1) + 1)]
    for step, (samples, batches) in enumerate(zip(plan, loader.steps(plan), strict=True), 1):
        name, audits = order[(step - 1) % len(order)]
        batches = [batch.to(world.device) for batch in batches]
        mesh.barrier()
        start, core_start = time.perf_counter(), time.process_time()
        with audits.step(step, samples, batches) as leaves:
            loss, _ = train_step(state.model, state.optimizer, batches, mesh, leaves=leaves)
        loss.item()
        of_cores[name].append(time.process_time() - core_start)
        mesh.barrier()
        seconds[name].append(time.perf_counter() - start)
        if name == WITHOUT:
            auditor.restart()
    if world.is_first:
        num_micro_batches = num_samples // (settings.train.micro_batch_size * mesh.num_batch_ranks)
        print(f"{num_micro_batches} micro-batches a step, {statistics.median(seconds[WITHOUT]) * 1000:.1f} ms")
        for name in (AT_REST, AUDIT):
            for what, found in (("time", seconds), ("processor time of rank 0", of_cores)):
                of_step = quartiles(ratios(found[name][1:], found[WITHOUT][1:]))
                print(f"{name}, {what} / that of a step without: {of_step:.4f}")
    stop_world()


if __name__ == "__main__":
    main(sys.argv[1:])
