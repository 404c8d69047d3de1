"""Muon trains as in one process if collectives and copies run late, and overwrite what does not wait for them."""

from tests.deferred import run_late
from tests.distributed.zero.optimizers.test_muon import HOST, Case, assert_equals_whole, train
from tests.ranks import call_with
from zero.memory.placement import OffloadConfig

CASES = [
    Case(3, 2, offload=HOST),
    Case(1, 2, offload=OffloadConfig(mode="host", states=("optimizer",)), num_micro_batches=3),
    Case(2, 1, 2),
]


def test_late_messages_of_matrices_change_nothing():
    for found in run_late(2, call_with, train, [[case] for case in CASES]):
        assert_equals_whole(found)
