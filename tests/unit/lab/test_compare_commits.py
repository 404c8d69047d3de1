"""The comparison of two commits: what two runs differ in, and that a run of the present one is equal to itself."""

from dataclasses import replace
from typing import Any

import pytest

from lab.compare_commits.__main__ import both_sides, compare_cases, main
from lab.compare_commits.cases import compared
from lab.compare_commits.comparison import Measured, Refused, compare
from parallel.validation.errors import ConfigError

STEPS = [{"step": 1, "loss": 5.5, "grad_norm": 2.0}, {"step": 2, "loss": 5.25, "grad_norm": 1.5}]
SENT = "all_reduce of 4 bytes"
RUN = Measured(STEPS, {"wte": "abc", "wpe": "def"}, [{SENT: 2, "barrier": 1}, {SENT: 2}], [70, 70])


def test_equal_runs_are_equal():
    row = compare("stage 0", RUN, replace(RUN, steps=[step | {"unix_time": 5.0} for step in STEPS]))
    assert row.is_equal
    assert row.cells() == ("stage 0", "equal", "equal: 5", "70")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"steps": [STEPS[0], STEPS[1] | {"loss": 5.375}]}, "step 2: loss 5.25, now 5.375 (+1.2e-01)"),
        ({"steps": [STEPS[0], STEPS[1] | {"grad_norm": None}]}, "step 2: grad_norm 1.5, now None"),
        ({"steps": STEPS[:1]}, "step 2: loss 5.25, now None"),
        ({"weights": {"wte": "abc", "wpe": "other"}}, "1 of 2 weights at the end, such as wpe"),
        ({"messages": [RUN.messages[0], {SENT: 1, "barrier": 1}]}, f"rank 1: -1 {SENT}; +1 barrier"),
        ({"messages": [{str(size): 1 for size in range(9)}, {}]}, "rank 0: +1 0; +1 1; +1 2; 8 others"),
    ],
)
def test_a_difference_in_bits_or_messages_is_named(change: dict[str, Any], found: str):
    row = compare("stage 0", RUN, replace(RUN, **change))
    assert not row.is_equal
    assert found in " | ".join(row.cells())


def test_other_host_operations_are_shown():
    assert compare("stage 0", RUN, replace(RUN, operations=[70, 71])).operations == "70, now 71"


def test_a_refusal_is_no_equality():
    refused = Refused("error: no")
    assert compare("stage 0", RUN, refused).bits == "refused by AFTER: error: no"
    assert not compare("stage 0", refused, refused).is_equal


def test_a_case_is_chosen_by_a_part_of_its_name():
    assert {case.num_ranks for case in compared("tensor 2")} == {4}
    assert {case.num_ranks * case.num_micro_batches for case in compared("fixed order")} == {12}
    with pytest.raises(ConfigError, match="--only=stage 4 is in no name"):
        main(["HEAD", "--only", "stage 4"])


@pytest.mark.full
def test_a_commit_is_equal_to_itself_and_other_rates_and_buckets_are_noticed():
    """The bucket and the rate are settings of one side only."""
    cases = compared("stage 1, tensor 1, fp32")
    with both_sides("HEAD", None, ["--model.num_layers=1"]) as (before, after):
        assert [row.is_equal for row in compare_cases(before, after, cases)] == [True]
        after.more = [*before.more, "--optimizer.lr=0.0021", "--zero.bucket_numel=1000000"]
        (row,) = compare_cases(before, after, cases)
        assert "step 2: loss" in row.bits
        assert "all_gather" in row.messages
        after.more = [*before.more, "--zero.stage=4"]
        (row,) = compare_cases(before, after, cases)
        assert row.bits.startswith("refused by AFTER: error: ")
