"""Totals and events of the communication log, and the formula of what an optimal algorithm sends."""

from unittest import mock

import pytest
import torch

from parallel.comm_log import CommEvent, CommLog


@pytest.mark.parametrize(
    ("op", "group_size", "expected"),
    [
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("broadcast", 4, 750),
        ("all_reduce", 4, 1500),
        ("all_reduce", 2, 1000),
        ("all_gather", 1, 0),
    ],
)
def test_bytes_on_the_wire(op, group_size, expected):
    assert CommEvent(op, "data", group_size, 1000, torch.float32, "").wire_bytes == expected


def test_totals_are_kept_by_axis_operation_and_phase():
    log = CommLog()
    log.record("all_gather", "data", 2, torch.zeros(10))
    with log.during("backward"):
        log.record("all_gather", "data", 2, torch.zeros(10, dtype=torch.float64))
        log.record("all_reduce", "tensor", 2, torch.zeros(10, dtype=torch.bfloat16))
        with log.during("update"):
            log.record("all_gather", "data", 2, torch.zeros(1))
        log.record("all_gather", "data", 2, torch.zeros(10))
    assert log.wire_bytes_by == {
        ("data", "all_gather", "setup"): 20,
        ("data", "all_gather", "backward"): 40 + 20,
        ("data", "all_gather", "update"): 2,
        ("tensor", "all_reduce", "backward"): 20,
    }
    assert (log.wire_bytes("data"), log.wire_bytes("tensor"), log.wire_bytes("none")) == (82, 20, 0)
    log.clear()
    assert log.wire_bytes("data") == 0


def test_a_phase_ends_where_its_block_raises():
    log = CommLog()
    with pytest.raises(KeyError), log.during("backward"):
        raise KeyError
    assert log.phase == "setup"


@pytest.mark.parametrize("keeps_events", [True, False])
def test_events_are_kept_on_request_only(keeps_events):
    log = CommLog(keeps_events)
    log.record("all_reduce", "data", 3, torch.zeros(2, 5, dtype=torch.bfloat16))
    event = CommEvent("all_reduce", "data", 3, 20, torch.bfloat16, "setup")
    assert log.events == ([event] if keeps_events else [])
    assert log.wire_bytes("data") == event.wire_bytes == 2 * 20 * 2 // 3


def test_a_mark_of_a_gpu_is_an_event_on_its_stream(monkeypatch):
    event = mock.Mock()
    event.query.side_effect = lambda: event.record.called
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    (log := CommLog()).follow(torch.device("cuda", 0))
    assert log.record("all_gather", "data", 2, torch.zeros(10)).is_reached
    event.record.assert_called_once_with()
