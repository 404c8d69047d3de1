"""Runs that lose nodes go on without them, with the losses of an undisturbed run; nodes are network namespaces."""

from pathlib import Path

import pytest

from lab.acceptance.child import as_options
from lab.faults.lost_nodes import NUM_RANKS, SETTINGS, lose_nodes
from lab.faults.runs import Steps, logged_steps
from lab.faults.testbed import testbed_problem
from tests.end_to_end.runs import run_on_rank
from tests.ranks import run_ranks

ROUNDS = {0: range(10), 1: range(30), 2: range(10)}  # by the number of nodes that are lost at once; 0: damaged files
BY_DEFAULT = (1, 0, 1)  # the first of two nodes is lost, of one rank each: every rank starts Python anew


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    if reason := testbed_problem():
        pytest.skip(reason)
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    arguments = as_options(SETTINGS | {"data.path": corpus, "run.dir": run_dir})
    run_ranks(2, run_on_rank, arguments, init_process_group=False)
    return logged_steps(run_dir)


@pytest.mark.parametrize(
    ("num_lost", "number", "num_ranks"),
    [
        BY_DEFAULT,
        *(
            pytest.param(num_lost, number, NUM_RANKS, marks=pytest.mark.full)
            for num_lost, numbers in ROUNDS.items()
            for number in numbers
        ),
    ],
)
def test_a_run_goes_on_without_lost_nodes(corpus, undisturbed, tmp_path, num_lost, number, num_ranks):
    found, wrong = lose_nodes(number, num_lost, corpus, tmp_path, num_ranks=num_ranks)
    assert not wrong
    assert found.steps == undisturbed
