"""Comparison of replicas: a single flipped bit is found, and the rank that differs is named."""

import pytest
import torch
from torch import Tensor

from gpt.build import TrainState
from gpt.replicas import DivergenceError, check_replicas
from tests.distributed.gpt.test_checkpoint_layouts import LayoutCase, build, train
from tests.ranks import run_ranks


def flip(state: TrainState, what: str) -> None:
    """Flip the lowest bit of one element."""
    flats = state.model.flats
    if what == "parameter":
        tensor = flats[0].full[:1]
    elif what == "master":
        tensor = flats[-1].buckets[0].master[:1]
    else:
        tensor = owned_norm(state)[:1]
    bits = tensor.view(torch.int64)
    bits ^= 1


def owned_norm(state: TrainState) -> Tensor:
    """Return the first piece that this rank owns of the last norm."""
    return next(
        bucket.master[part.start - bucket.elements.start : part.stop - bucket.elements.start]
        for flat in state.model.flats
        for bucket in flat.buckets
        for span, part in flat.layout.spans_in(bucket.elements)
        if span.name == "final_norm.weight"
    )


def find(case: LayoutCase, what: str, odd_rank: int) -> str:
    state = build(case)
    train(state, 0, 1)
    check_replicas(state, 1)
    if state.mesh.rank == odd_rank:
        flip(state, what)
    try:
        check_replicas(state, 2)
    except DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "what", "odd_rank", "message"),
    [
        (LayoutCase(0, 4), "parameter", 2, "step 2: the parameters of data rank 2 differ"),
        (LayoutCase(3, 4, shard_size=2), "master", 2, "step 2: the master weights of replica rank 1 differ"),
    ],
    ids=str,
)
def test_a_flipped_bit_is_found(case, what, odd_rank, message):
    found = run_ranks(case.num_ranks, find, case, what, odd_rank)
    assert any(text.startswith(message) for text in found), found


def test_what_the_tensor_axis_replicates_is_compared_too():
    found = run_ranks(4, find, LayoutCase(3, 1, 4), "norm", 1)
    assert all("the parameters that are not split of tensor rank 1 differ" in text for text in found), found
