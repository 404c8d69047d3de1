"""Nodes agree on the starts of a job, from the records that they publish."""

from dataclasses import replace

import pytest

from parallel.ending import EXIT_LOST
from parallel.launch.membership import (
    Limits,
    Record,
    can_grow,
    end_of_job,
    is_broken,
    next_start,
    start_to_join,
    with_newer_start,
)

LIMITS = Limits(min_nodes=1, max_restarts=3, max_failures_of_node=2)
A, B, C = (Record(name, f"{name}1") for name in "abc")
ABC = {"a": "a1", "b": "b1", "c": "c1"}


def of_start(number: int, *records: Record, **changes) -> dict[str, Record | None]:
    members = {record.node: record.incarnation for record in records}
    return {
        record.node: replace(record, start=number, members=members, launch="l", **{"state": "running"} | changes)
        for record in records
    }


RUNNING, STOPPED = of_start(1, A, B, C), of_start(1, A, B, C, state="waiting")


def led_by(own: Record, found: dict, limits: Limits = LIMITS, is_patient: bool = False) -> list[str] | str:
    start = next_start(own, found, limits, is_patient)
    return list(start.members) if isinstance(start, Record) else start


def test_the_first_node_of_the_list_leads_when_all_are_there():
    assert led_by(A, {"a": A, "b": B, "c": None}, is_patient=True) == "waiting for c"
    assert led_by(A, {"a": A, "b": B, "c": None}) == ["a", "b"]
    assert led_by(B, {"a": A, "b": B, "c": C}) == "a leads"
    assert led_by(A, {"a": A, "b": B, "c": C}, is_patient=True) == ["a", "b", "c"]


@pytest.mark.parametrize("lost", "abc")
def test_any_node_can_be_lost(lost: str):
    left = [node for node in "abc" if node != lost]
    for node in left:
        alone_sees = RUNNING | {lost: None}
        is_asked = node == left[0] or lost == "a"  # the others follow the leader
        assert is_broken(RUNNING[node], alone_sees, may_still_join=True) == (is_asked and (lost == "a" or node == "a"))
    found = STOPPED | {lost: None}
    start = next_start(found[left[0]], found, LIMITS, is_patient=True)
    assert isinstance(start, Record)
    assert (start.start, list(start.members), start.failures, start.num_restarts) == (2, left, {lost: 1}, 0)
    assert start_to_join(found[left[1]], found | {left[0]: start}) is start


def test_nobody_leads_while_another_node_still_runs():
    assert led_by(STOPPED["b"], STOPPED | {"a": None, "c": RUNNING["c"]}) == "c still run"


def test_a_restarted_agent_is_lost_and_comes_back_in_the_next_start():
    again = Record("b", "b2")
    found = RUNNING | {"b": again}
    assert is_broken(RUNNING["a"], found, may_still_join=True)
    assert start_to_join(again, found) is None
    start = next_start(STOPPED["a"], STOPPED | {"b": again}, LIMITS, is_patient=False)
    assert isinstance(start, Record)
    assert start.members == ABC | {"b": "b2"}
    assert start.failures == {"b": 1}


def test_a_member_that_does_not_join_in_time_breaks_the_start():
    found = RUNNING | {"c": replace(C, members={}, start=0)}
    assert not is_broken(RUNNING["a"], found, may_still_join=True)
    assert is_broken(RUNNING["a"], found, may_still_join=False)


def test_a_node_that_fails_repeatedly_is_left_out_and_failed_ranks_count_as_restarts():
    failed = STOPPED | {"b": replace(STOPPED["b"], code=1), "c": replace(STOPPED["c"], code=EXIT_LOST)}
    start = next_start(failed["a"], failed, LIMITS, is_patient=False)
    assert isinstance(start, Record)
    assert (start.failures, start.num_restarts, list(start.members)) == ({"b": 1}, 1, ["a", "b", "c"])
    again = {node: replace(record, failures={"b": 1}) for node, record in failed.items()}
    assert led_by(again["a"], again) == ["a", "c"]


@pytest.mark.parametrize(
    ("codes", "failures"),
    [
        ({"b": 137, "a": 134, "c": 134}, {"b": 1}),  # a rank of b was killed
        ({"b": None, "a": 134, "c": 134}, {"b": 1}),  # b was lost
        ({"b": 134, "c": EXIT_LOST}, {"b": 1}),  # the GPU of b has failed
        ({"b": 134, "c": 134}, {}),  # either may have failed first
    ],
)
def test_a_node_whose_ranks_nccl_has_aborted_failed_first_only_if_nothing_else_did(codes: dict, failures: dict):
    found = STOPPED | {node: code and replace(STOPPED[node], code=code) for node, code in codes.items()}
    start = next_start(found["a"], found, LIMITS, is_patient=False)
    assert isinstance(start, Record)
    assert (start.failures, start.num_restarts) == (failures, None not in codes.values())


def test_a_regroup_goes_on_while_nodes_wait_for_the_ranks_of_others_to_end():
    found = of_start(1, A, B, C, state="regrouping")
    for own, waiting in (("a", "b"), ("b", "a")):
        seen = found | {waiting: replace(found[waiting], state="waiting")}
        assert not is_broken(found[own], seen, may_still_join=False, may_still_end=True)
        assert is_broken(found[own], seen, may_still_join=False, may_still_end=False)
        assert is_broken(RUNNING[own], seen, may_still_join=False, may_still_end=True)
        assert is_broken(found[own], seen | {waiting: None}, may_still_join=False, may_still_end=True)


def test_codes_of_ranks_that_were_asked_to_end_in_a_regroup_do_not_count_and_lost_nodes_do():
    found = STOPPED | {"a": replace(STOPPED["a"], code=0), "b": replace(STOPPED["b"], code=143)}
    for lost, failures in (({}, {}), ({"c": None}, {"c": 1})):
        start = next_start(found["a"], found | lost, LIMITS, is_patient=False)
        assert isinstance(start, Record)
        assert (start.failures, start.num_restarts) == (failures, 0)


def test_the_most_nodes_to_which_the_settings_fit_take_part_and_spares_wait():
    even = replace(LIMITS, fits=lambda number: number in (1, 2))
    assert led_by(A, {"a": A, "b": B, "c": C}, even) == ["a", "b"]
    assert led_by(A, {"a": A, "b": B}, replace(LIMITS, min_nodes=3)).startswith("2 of 2 nodes are too few")
    two = of_start(1, A, B) | {"c": C}
    assert not can_grow(two["a"], two, even)
    assert can_grow(two["a"], two, LIMITS)
    assert not can_grow(replace(two["a"], failures={"c": 2}), two, LIMITS)


def test_the_end_of_the_newest_start_ends_the_job_everywhere():
    ended = of_start(2, A, B, state="ended", code=0)
    assert end_of_job(C, ended | {"c": C}) == ended["a"]
    assert end_of_job(C, ended | {"c": C, "b": replace(B, start=3, members={"b": "b1"}, state="running")}) is None
    assert end_of_job(C, {"a": None, "b": None, "c": C}) is None


def test_half_of_the_members_or_fewer_go_on_only_if_an_arbiter_grants_it_or_the_user_says_that_there_is_none():
    four = of_start(1, *(Record(name, f"{name}1") for name in "abcd"), state="waiting")
    half = four | {"c": None, "d": None}
    assert "2 of 4 nodes are no majority" in led_by(four["a"], half)
    assert led_by(four["a"], half, replace(LIMITS, needs_majority=False)) == ["a", "b"]
    granted = {node: record and replace(record, has_arbiter=True) for node, record in half.items()}
    assert led_by(four["a"], granted) == ["a", "b"]
    assert led_by(four["a"], four | {"d": None}) == ["a", "b", "c"]
    # Nodes that have come back, or spares, do not count: they may know nothing of a newer start.
    again = {"a": four["a"], "b": Record("b", "b2"), "c": Record("c", "c2"), "d": None}
    assert "1 of 4 nodes are no majority" in led_by(again["a"], again)
    assert "1 of 2 nodes are no majority" in led_by(A, {"a": A, "b": None})  # before the first start


def test_a_node_that_waits_knows_the_newest_start_and_cannot_help_the_members_of_an_older_one():
    newest = of_start(2, A, B)
    spare = with_newer_start(STOPPED["c"], newest | {"c": STOPPED["c"]})
    assert (spare.start, spare.members, spare.state) == (2, {"a": "a1", "b": "b1"}, "waiting")
    assert "0 of 2 nodes are no majority" in led_by(spare, {"a": None, "b": None, "c": spare})
    assert with_newer_start(STOPPED["a"], newest) is STOPPED["a"]  # a member joins it instead


def test_restarts_are_counted_since_the_last_progress():
    def restarts(step: int, **before: int) -> tuple[int, int]:
        failed = {node: replace(record, code=1, step=step, **before) for node, record in STOPPED.items()}
        start = next_start(failed["a"], failed, LIMITS, is_patient=False)
        assert isinstance(start, Record)
        return start.num_restarts, start.counted_from

    assert restarts(70, num_restarts=3, counted_from=70) == (4, 70)
    assert restarts(71, num_restarts=3, counted_from=70) == (1, 71)
