"""Muon trains as in one process if collectives and copies run late, and overwrite what does not wait for them."""

from torch import Tensor

from tests.deferred import deferred
from tests.distributed.zero.optimizers.test_muon import HOST, Case, assert_equals_whole, train
from tests.ranks import run_ranks
from zero.offload.placement import OffloadConfig

CASES = [
    Case(3, 2, offload=HOST),
    Case(1, 2, offload=OffloadConfig(mode="host", states=("optimizer",)), num_micro_batches=3),
    Case(2, 1, 2),
]


def train_late(cases: list[Case]) -> list[dict[str, Tensor]]:
    found = []
    for case in cases:
        with deferred():
            found.append(train(case))
    return found


def test_late_messages_of_matrices_change_nothing():
    for found in run_ranks(2, train_late, CASES):
        assert_equals_whole(found)
