"""The timers of profiled steps, by clocks that are told what time it is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from gpt.monitor import profiling
from gpt.monitor.profiling import TIMERS, Profiler, timer_table
from gpt.settings.run import ProfileSettings
from parallel.mesh import Mesh

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Clock:
    """A clock of seconds, and of events of a GPU, which are reached when they are waited for."""

    def __init__(self) -> None:
        self.now = 100.0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock):
        self.clock, self.time, self.is_reached = clock, None, False

    def record(self) -> None:
        self.time = self.clock.now

    def synchronize(self) -> None:
        self.is_reached = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.is_reached, "an event is read before the GPU has reached it"
        return (end.time - self.time) * 1e3


class NoTrace:
    """A trace of nothing."""

    def __init__(self, activities: list[ProfilerActivity]):
        self.activities = activities

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps([str(activity) for activity in self.activities]))


def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[dict[str, float]]:
    """Profile steps 3 and 4, of 10 seconds each, 2 of which the backward waits for a collective; return the timers."""
    clock, mesh = Clock(), Mesh.create(1)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(profiling, "profile", NoTrace)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    profiler = Profiler(ProfileSettings(steps=(3, 4)), mesh, device, tmp_path, ["n1"])
    monkeypatch.setattr(profiler, "_gather_timers", lambda own: [dict(zip((*TIMERS, "step"), own, strict=True))])
    found = []
    for step in range(1, 6):
        profiler.begin(step)
        for phase, seconds in (("forward", 3.0), ("backward", 3.0), ("update", 1.0)):
            with mesh.log.during(phase):
                clock.now += seconds
                if phase == "backward":
                    event = mesh.log.record("all_gather", "data", 2, torch.zeros(1))
                    mesh.log.record_wait_start(event)
                    clock.now += 2.0
                    mesh.log.record_wait_end(event)
        clock.now += 1.0
        found.append(profiler.end(step))
    assert [timers is not None for timers in found] == [False, False, False, True, False]
    return found[3]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_waits_are_counted_apart_from_the_phases_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    (timers,) = profiled(tmp_path, monkeypatch, device)
    assert timers["step"] == pytest.approx(10.0)
    assert {name: seconds for name, seconds in timers.items() if seconds and name != "step"} == pytest.approx(
        {"forward": 3.0, "backward": 3.0, "gather": 2.0, "update": 1.0}
    )
    assert json.loads((tmp_path / "profile/timers.json").read_text()) == [timers]
    activities = ["CPU"] if device is CPU else ["CPU", "CUDA"]
    assert json.loads((tmp_path / "profile/rank-0.json").read_text()) == [f"ProfilerActivity.{a}" for a in activities]


def test_the_table_of_timers_shows_the_mean_and_the_slowest_rank():
    usual = dict.fromkeys((*TIMERS, "step"), 0.001)
    table = timer_table([usual, usual | {"step": 0.007}, usual])
    name, mean, _, slowest = ([*column.cells][-1] for column in table.columns)
    assert (name, mean, slowest) == ("step", "3.00", "7.00 (rank 1)")
