"""Where the time of a few steps goes: timers of all ranks, the rank that holds up the others, and a trace.

Every phase that `CommLog.during` names is timed, and what was waited for in it is taken out and counted by what it was:

    forward, backward, update     computing
    reduce                        waiting for reduce-scatters and all-reduces
    gather                        waiting for all-gathers and broadcasts
    data, checkpoint              the next batch; a save, as far as the step waits for it

On a GPU the stamps are events on its stream: waiting is the stream's, and the host never waits.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from gpt.settings import ProfileSettings
from parallel.instruments.comm_log import CommEvent
from parallel.mesh import Mesh

COMPUTING = ("forward", "backward", "update")
WAITING = {"reduce_scatter": "reduce", "all_reduce": "reduce", "all_gather": "gather", "broadcast": "gather"}
TIMERS = (*COMPUTING, "reduce", "gather", "data", "checkpoint")
STRAGGLER_FACTOR = 1.15
FOLDER = "profile"


class Profiler:
    """All ranks call `begin` before every step, its data included, and `end` after it."""

    def __init__(self, settings: ProfileSettings, mesh: Mesh, device: torch.device, run_dir: Path):
        self._settings, self._mesh, self._device = settings, mesh, device
        self._folder = run_dir / FOLDER
        self._phases: list[tuple[str, Any, Any]] = []
        self._trace: profile | None = None

    def begin(self, step: int) -> None:
        if self._settings.steps is None or step != self._settings.steps[0]:
            return
        log = self._mesh.log
        self._before = log.keeps_events, log.clock, log.on_phase
        log.keeps_events, log.clock, log.on_phase = True, self._stamp, self._watch
        log.events.clear()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._trace = profile(activities=activities)
        self._trace.start()
        self._start = self._stamp()

    def end(self, step: int) -> list[dict[str, float]] | None:
        """After the last of the steps: the timers of every rank, seconds a step; their sum is "step"."""
        if self._trace is None or self._settings.steps is None or step < self._settings.steps[1]:
            return None
        stop, log = self._stamp(), self._mesh.log
        log.keeps_events, log.clock, log.on_phase = self._before
        self._trace.stop()
        num_steps = step - self._settings.steps[0] + 1
        own = self._timers(log.events, stop)
        log.events.clear()
        if self._mesh.rank in self._settings.ranks:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(self._folder / f"rank-{self._mesh.rank}.json"))
        self._trace = None
        of_ranks = self._of_all_ranks([own[name] / num_steps for name in (*TIMERS, "step")])
        if self._mesh.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "timers.json").write_text(json.dumps(of_ranks, indent=1) + "\n")
        return of_ranks

    def _timers(self, events: list[CommEvent], stop: Any) -> dict[str, float]:
        seconds = defaultdict(float, step=self._seconds(self._start, stop))
        for phase, start, end in self._phases:
            seconds[phase] += self._seconds(start, end)
        for event in events:
            if event.awaited and event.completed and event.phase in COMPUTING:
                waited = self._seconds(event.awaited, event.completed)
                seconds[event.phase] -= waited
                seconds[WAITING[event.op]] += waited
        self._phases.clear()
        return seconds

    def _of_all_ranks(self, own: list[float]) -> list[dict[str, float]]:
        mesh, names = self._mesh, (*TIMERS, "step")
        row = torch.tensor(own, dtype=torch.float32, device=self._device)
        of_tensor = row.new_empty(mesh.tensor.size * len(names))
        mesh.tensor.all_gather(row, out=of_tensor).wait()
        of_all = row.new_empty(mesh.size * len(names))
        mesh.data.all_gather(of_tensor, out=of_all).wait()
        return [dict(zip(names, values, strict=True)) for values in of_all.view(mesh.size, -1).tolist()]

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        start = self._stamp()
        with record_function(phase):
            yield
        self._phases.append((phase, start, self._stamp()))

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def stragglers(of_ranks: list[dict[str, float]]) -> list[tuple[int, float]]:
    """(rank, how many times the median it computes), of those that the others wait for."""
    computing = [sum(timers[name] for name in COMPUTING) for timers in of_ranks]
    usual = median(computing)
    return [(rank, own / usual) for rank, own in enumerate(computing) if own > STRAGGLER_FACTOR * usual]


def timer_table(of_ranks: list[dict[str, float]]) -> Table:
    table = Table(title="Timers, ms a step", title_justify="left")
    for heading in ("", "mean", "fastest rank", "slowest rank"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in (*TIMERS, "step"):
        values = [1e3 * timers[name] for timers in of_ranks]
        ends = [f"{value:,.2f} (rank {values.index(value)})" for value in (min(values), max(values))]
        table.add_row(name, f"{sum(values) / len(values):,.2f}", *ends)
    return table


def straggler_lines(of_ranks: list[dict[str, float]], nodes: Sequence[str]) -> list[str]:
    """`nodes` names the node of every rank."""
    return [
        f"straggler: rank {rank} on {nodes[rank]} computes {factor:.2f} times as long as the median rank"
        for rank, factor in stragglers(of_ranks)
    ]
