"""Runs that lose nodes go on without them, with the losses of an undisturbed run; nodes are network namespaces."""

import pytest

from lab.acceptance.child import as_options
from lab.faults import testbed
from lab.faults.lost_nodes import NUM_RANKS, SETTINGS, lose_nodes
from lab.faults.runs import logged_steps
from tests.end_to_end.runs import run_on_rank
from tests.ranks import run_ranks

ROUNDS = {0: range(10), 1: range(30), 2: range(10)}  # by the number of nodes that are lost at once; 0: damaged files
BY_DEFAULT = (1, 0, 1, 16)  # the first of two nodes is lost, of one rank each: every rank starts Python anew


@pytest.mark.parametrize(
    ("num_lost", "number", "num_ranks", "num_steps"),
    [
        BY_DEFAULT,
        *(
            pytest.param(num_lost, number, NUM_RANKS, SETTINGS["train.steps"], marks=pytest.mark.full)
            for num_lost, numbers in ROUNDS.items()
            for number in numbers
        ),
    ],
)
def test_a_run_goes_on_without_lost_nodes(corpus, tmp_path, monkeypatch, num_lost, number, num_ranks, num_steps):
    if reason := testbed.testbed_problem():
        pytest.skip(reason)
    monkeypatch.setitem(SETTINGS, "train.steps", num_steps)
    found, wrong = lose_nodes(number, num_lost, corpus, tmp_path, num_ranks=num_ranks)
    assert not wrong
    undisturbed = as_options(SETTINGS | {"data.path": corpus, "run.dir": tmp_path / "undisturbed"})
    run_ranks(2, run_on_rank, undisturbed, init_process_group=False)
    assert found.steps == logged_steps(tmp_path / "undisturbed")
