"""The operations that the engine issues in a step, beside those of the model: the work of the host, without a clock."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpt.builder.train_state import TrainState, build, build_mesh
from gpt.model.transformer import GPT
from gpt.train_step import train_step
from lab.dryrun.dry_run import blank_micro_batches
from lab.dryrun.unchecked_streams import UncheckedStreams
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.operation_observer import observe_operations
from parallel.world import imitated_world
from tests.distributed.lab.test_streams import FACTORS, settings_of

NUM_RANKS = 8
# A gradient is viewed as flat, and copied to its place in its bucket. A bucket is reduced, divided, cast, updated, cast
# back and gathered; its shard consists of pieces of parameters, each of which the optimizer gets as a view. The rest is
# that of a step: its loss, its norm and its clip coefficient.
OF_A_GRADIENT, OF_A_PIECE, OF_A_BUCKET, OF_A_STEP = 3, 1, 24, 50


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def on_operation(self, *_: object) -> None:
        self.number += 1


def number_of_operations(function: Callable[[], object]) -> int:
    counter = Counter()
    with observe_operations(counter):
        function()
    return counter.number


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_issues_few_operations_beside_those_of_the_model(stage: int):
    values = stage, (NUM_RANKS, None, 1), 1, "reduce", "none", "none", "bf16", "adamw", ""
    settings = settings_of(dict(zip(FACTORS, values, strict=True)))
    settings = replace(settings, zero=replace(settings.zero, bucket_numel=16384))
    with imitated_world(0, NUM_RANKS, NUM_RANKS, "nccl") as world:
        mesh = build_mesh(settings, world)
        with QuickFakeTensorMode(), observe_operations(UncheckedStreams()):
            state = build(settings, mesh, world.device)
            (tokens,) = micro_batches = blank_micro_batches(settings.train, settings.model.seq_length, mesh.data.size)

            def step() -> None:
                train_step(state.model, state.optimizer, micro_batches, mesh)

            def plain_step() -> None:
                model(tokens[:, :-1], tokens[:, 1:]).backward()

            for _ in range(2):
                step()
            model = GPT(settings.model, state.model.module.tokens).to(settings.train.dtype)
            added = number_of_operations(step) - number_of_operations(plain_step)
    assert added <= budget(state)


def budget(state: TrainState) -> int:
    buckets = state.model.buckets
    of_gradients = OF_A_GRADIENT * sum(len(bucket.grads.parts) for bucket in buckets)
    of_pieces = OF_A_PIECE * sum(len(state.optimizer.pieces_of(bucket)) for bucket in buckets)
    return of_gradients + of_pieces + OF_A_BUCKET * len(buckets) + OF_A_STEP
