"""Runs that lose nodes go on without them, with the losses of an undisturbed run; nodes are network namespaces."""

from pathlib import Path

import pytest

from lab.faults.lost_nodes import lose_nodes, undisturbed_steps
from lab.faults.runs import Steps, prepare_corpus
from lab.faults.testbed import testbed_problem

ROUNDS = {0: range(10), 1: range(30), 2: range(10)}  # by the number of nodes that are lost at once; 0: damaged files
BY_DEFAULT = {(1, 0)}  # the first of two nodes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := testbed_problem():
        pytest.skip(reason)
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return undisturbed_steps(corpus, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("num_lost", "number"),
    [
        pytest.param(num_lost, number, marks=[] if (num_lost, number) in BY_DEFAULT else pytest.mark.full)
        for num_lost, numbers in ROUNDS.items()
        for number in numbers
    ],
)
def test_a_run_goes_on_without_lost_nodes(corpus, undisturbed, tmp_path, num_lost, number):
    found, wrong = lose_nodes(number, num_lost, corpus, tmp_path)
    assert not wrong
    assert found.steps == undisturbed
