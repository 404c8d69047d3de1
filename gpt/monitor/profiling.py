"""Profiles of a few steps: timers of all ranks, the ranks that delay the others, and traces.

Every phase that `CommLog.during` names has a timer. If a collective is waited for during forward, backward or update,
the time spent waiting is subtracted from that phase and added to the timer of the kind of collective:

    forward, backward, update     computing
    reduce                        waiting for reduce-scatters and all-reduces
    gather                        waiting for all-gathers and broadcasts
    data, checkpoint              reading the next batch; the part of a save that the step waits for

On a GPU, times are those of CUDA events on its stream: waiting means that the stream waits, and the host does not.
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

from gpt.run_folder.files import written_if_possible
from gpt.settings.run import ProfileSettings
from parallel.comm_log import CommEvent
from parallel.mesh import Mesh
from parallel.pairwise import complete_all

COMPUTING = ("forward", "backward", "update")
WAITING = {
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "all_gather": "gather",
    "broadcast": "gather",
    "all_to_all": "gather",
}
TIMERS = (*COMPUTING, "reduce", "gather", "data", "checkpoint")
STRAGGLER_FACTOR = 1.15
FOLDER = "profile"


class Profiler:
    """The profiler of the steps that the settings select.

    All ranks call `begin` before every step, before its batch is read, and `end` after it. `nodes` has the name of
    every rank's node, for `straggler_lines`.
    """

    def __init__(
        self, settings: ProfileSettings, mesh: Mesh, device: torch.device, run_dir: Path, nodes: Sequence[str]
    ):
        self._settings, self._mesh, self._device, self.nodes = settings, mesh, device, nodes
        self._folder = run_dir / FOLDER
        self._phases: list[tuple[str, Any, Any]] = []
        self._trace: profile | None = None

    def begin(self, step: int) -> None:
        """Start timers and the trace if `step` is the first one to profile."""
        if self._settings.steps is None or step != self._settings.steps[0]:
            return
        log = self._mesh.log
        self._saved = log.keeps_events, log.clock, log.on_phase
        log.keeps_events, log.clock, log.on_phase = True, self._now, self._timed
        log.events.clear()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._trace = profile(activities=activities)
        self._trace.start()
        # The profiler starts in a time that differs between ranks. Without this barrier, the others would wait for the
        # slowest one in their first collective, and that wait would be counted.
        self._mesh.barrier()
        self._start = self._now()

    def end(self, step: int) -> list[dict[str, float]] | None:
        """If `step` is the last one to profile, write traces and timers and return the timers of all ranks, else None.

        Timers are seconds per step. The timer "step" covers the whole step; the others add up to at most that. Ranks
        exchange their timers along the mesh.
        """
        if self._trace is None or self._settings.steps is None or step < self._settings.steps[1]:
            return None
        stop, log = self._now(), self._mesh.log
        log.keeps_events, log.clock, log.on_phase = self._saved
        complete_all()  # torch would write the ends of later messages over gloo to memory of the trace that is freed
        self._trace.stop()
        num_steps = step - self._settings.steps[0] + 1
        own = self._timers(log.events, stop)
        log.events.clear()
        if self._mesh.rank in self._settings.ranks:
            path = self._folder / f"rank-{self._mesh.rank}.json"
            with written_if_possible(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._trace.export_chrome_trace(str(path))
        self._trace = None
        by_rank = self._gather_timers([own[name] / num_steps for name in (*TIMERS, "step")])
        if self._mesh.rank == 0:
            path = self._folder / "timers.json"
            with written_if_possible(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(by_rank, indent=1) + "\n")
        return by_rank

    def _timers(self, events: list[CommEvent], stop: Any) -> dict[str, float]:
        """Return this rank's seconds in all profiled steps together."""
        seconds = defaultdict(float, step=self._seconds(self._start, stop))
        for phase, start, end in self._phases:
            seconds[phase] += self._seconds(start, end)
        for event in events:
            if event.awaited and event.completed and event.waiting_phase in COMPUTING:
                waited = self._seconds(event.awaited, event.completed)
                seconds[event.waiting_phase] -= waited
                seconds[WAITING[event.op]] += waited
        self._phases.clear()
        return seconds

    def _gather_timers(self, own: list[float]) -> list[dict[str, float]]:
        """Return the timers of every rank, in the order of ranks."""
        mesh, names = self._mesh, (*TIMERS, "step")
        row = torch.tensor(own, dtype=torch.float32, device=self._device)
        rows = mesh.data.gather_by_rank(mesh.tensor.gather_by_rank(row)).view(mesh.size, -1)
        return [dict(zip(names, values, strict=True)) for values in rows.tolist()]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Time a phase, and name it in the trace."""
        start = self._now()
        with record_function(phase):
            yield
        self._phases.append((phase, start, self._now()))

    def _now(self) -> Any:
        """Return the present time: a recorded CUDA event on a GPU, seconds on a CPU."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two results of `_now`. On a GPU, wait for the second one."""
        if self._device.type != "cuda":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def stragglers(by_rank: list[dict[str, float]]) -> list[tuple[int, float]]:
    """Return (rank, ratio of its computing time to the median) of the ranks that delay the others."""
    computing = [sum(timers[name] for name in COMPUTING) for timers in by_rank]
    usual = median(computing)
    return [(rank, own / usual) for rank, own in enumerate(computing) if own > STRAGGLER_FACTOR * usual]


def timer_table(by_rank: list[dict[str, float]]) -> Table:
    """Return a table of each timer: its mean over ranks, and the fastest and the slowest rank."""
    table = Table(title="Timers, ms per step", title_justify="left")
    for heading in ("", "mean", "fastest rank", "slowest rank"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in (*TIMERS, "step"):
        values = [1e3 * timers[name] for timers in by_rank]
        ends = [f"{value:,.2f} (rank {values.index(value)})" for value in (min(values), max(values))]
        table.add_row(name, f"{sum(values) / len(values):,.2f}", *ends)
    return table


def straggler_lines(by_rank: list[dict[str, float]], nodes: Sequence[str]) -> list[str]:
    """Return a line about each rank that delays the others; `nodes` has the name of every rank's node."""
    return [
        f"straggler: rank {rank} on {nodes[rank]} computes {factor:.2f} times as long as the median rank"
        for rank, factor in stragglers(by_rank)
    ]
