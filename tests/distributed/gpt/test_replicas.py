"""Comparison of replicas: a single flipped bit is found, and the rank that differs is named."""

import pytest
import torch
from torch import Tensor

from gpt.audit import DivergenceError, compare_replicas
from gpt.builder.train_state import TrainState
from tests.distributed.gpt.test_checkpoint_layouts import LayoutCase, build, train
from tests.ranks import run_ranks


def flip(state: TrainState, what: str) -> None:
    """Flip the lowest bit of one element."""
    flats = state.model.flats
    if what == "parameter":
        tensor = flats[0].full[:1]
    elif what == "master":
        tensor = flats[-1].buckets[0].master[:1]
    elif what == "moment":
        piece = state.optimizer.pieces_of(state.optimizer.buckets[0])[0]
        tensor = state.optimizer.states_of(piece)["exp_avg_sq"][:1]
    else:
        tensor = owned_norm(state)[:1]
    bits = tensor.view(torch.int64)
    bits ^= 1


def owned_norm(state: TrainState) -> Tensor:
    """Return the first piece that this rank owns of the last norm."""
    return next(
        bucket.master[part.start - bucket.ranges.elements.start : part.stop - bucket.ranges.elements.start]
        for flat in state.model.flats
        for bucket in flat.buckets
        for span, part in flat.layout.spans_in(bucket.ranges.elements)
        if span.name == "final_norm.weight"
    )


def find(case: LayoutCase, flips: list[tuple[str, int]]) -> list[str]:
    """Flip a bit of something on one rank, and return this rank's error, for each (what, rank) in turn."""
    state = build(case)
    train(state, 0, 1)
    errors = []
    for what, odd_rank in flips:
        compare_replicas(state, 1)
        if state.mesh.rank == odd_rank:
            flip(state, what)
        try:
            compare_replicas(state, 2)
        except DivergenceError as error:
            errors.append(str(error))
        else:
            errors.append("")
        if state.mesh.rank == odd_rank:
            flip(state, what)  # back
    return errors


FIRST, LAST = "token_embedding.weight", "final_norm.weight"


@pytest.mark.parametrize(
    ("case", "flips"),
    [
        (
            LayoutCase(0, 4),
            {
                ("parameter", 2): "step 2: the parameters of data rank 2 differ in FIRST from those of the other 3",
                ("norm", 0): "step 2: the parameters of data rank 0 differ in LAST from those of the other 3",
                ("moment", 3): "step 2: the optimizer states of data rank 3 differ in exp_avg_sq of ",
            },
        ),
        (LayoutCase(2, 4), {("parameter", 1): "step 2: the parameters of data rank 1 differ in FIRST from those of"}),
        (
            LayoutCase(3, 4, shard_size=2),
            {
                ("master", 2): "step 2: the master weights of replica ranks 0, 1 differ in ",
                ("moment", 0): "step 2: the optimizer states of replica ranks 0, 1 differ in exp_avg_sq of ",
            },
        ),
        (
            LayoutCase(3, 1, 4),
            {("norm", 1): "step 2: the parameters that are not split of tensor rank 1 differ in LAST from those of"},
        ),
    ],
    ids=["stage 0", "stage 2", "stage 3 in groups", "tensor"],
)
def test_a_flipped_bit_is_found_with_its_rank_and_parameter(case, flips):
    found = run_ranks(case.num_ranks, find, case, list(flips))
    for errors, message in zip(zip(*found, strict=True), flips.values(), strict=True):
        expected = message.replace("FIRST", FIRST).replace("LAST", LAST)
        assert any(error.startswith(expected) for error in errors), errors
