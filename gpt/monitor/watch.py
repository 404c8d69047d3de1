"""A watch over a run: a signal stops all ranks after the same step; a hang ends them, with reports in run.dir/hang.

rank-3.json         the collectives that were launched last: axis, operation, bytes, type, place in the code, and state
nccl_trace_rank_3   torch's flight record, on GPUs: `torchfrtrace --prefix nccl_trace_rank_ run.dir/hang` compares ranks
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt.run_folder.files import HANG, written_if_possible
from gpt.settings.settings import Settings
from parallel.comm_log import CommEvent, CommLog
from parallel.process_defaults import FLIGHT_RECORD
from parallel.stopping import Stopping
from parallel.store import shared_store
from parallel.torch_internals import flight_record
from parallel.validation.paths import unlink_link
from parallel.watchdog import Watchdog
from parallel.world import World

NUM_LAST = 50  # collectives in a report


class Watch:
    """The watch of one rank; `on_abort` is called with the reason just before a rank is ended, in another thread."""

    def __init__(self, settings: Settings, world: World, log: CommLog):
        self.on_abort: Callable[[str], None] = lambda reason: None
        store = shared_store()

        def on_abort(reason: str) -> None:
            self.on_abort(reason)

        def on_hang(reason: str) -> None:  # the report first: `on_abort` may take seconds
            try:
                write_hang_report(Path(settings.run.dir), world.rank, log, reason)
            finally:
                on_abort(reason)

        save_seconds = 60 * settings.checkpoint.every_minutes
        self._stopping = Stopping(store, world.rank, world.size, on_abort, save_seconds=save_seconds)
        self._watchdog = Watchdog(store, world.rank, world.size, log, settings.run.hang_seconds, on_hang)
        if settings.run.hang_seconds:
            log.follow(world.device)
        self.has_stopped = False
        self.running = self._watchdog.running  # a context in which a hang ends the run
        self.handling_signals = self._stopping.handling_signals  # in which the first signal asks all ranks to stop
        self.is_save_due, self.saved = self._stopping.is_save_due, self._stopping.saved

    def may_begin(self, step: int) -> bool:
        """Return False if a signal has made the step before the last one. Blocks while ranks agree."""
        self.has_stopped = not self._stopping.may_begin(step)
        self._watchdog.begin_step()
        return not self.has_stopped

    def beat(self) -> None:
        """Record progress other than a collective. May be called from any thread."""
        self._watchdog.beat()


def write_hang_report(run_dir: Path, rank: int, log: CommLog, reason: str) -> None:
    """Write the collectives of a rank that hangs, or waits for one that hangs. May be called from any thread."""
    folder = run_dir / HANG
    now, newest = log.progress(), list(log.newest)
    first_number = log.num_recorded - len(newest) + 1
    rows = [{"number": first_number + index} | _row(event) for index, event in enumerate(newest)]
    # The host may have launched many more than the device has run: then the list begins before the first of these.
    start = min(len(rows) - NUM_LAST, now.num_complete - first_number - NUM_LAST // 2)
    report = {
        "reason": reason,
        "num_launched": now.num_launched,
        "num_reached": now.num_reached,
        "num_complete": now.num_complete,
        "collectives": rows[max(0, start) :],
    }
    with written_if_possible(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = folder / f"rank-{rank}.json", folder / f"{FLIGHT_RECORD}{rank}"
        for file in files:
            unlink_link(file)
        files[0].write_text(json.dumps(report, indent=1) + "\n")
        # Last, because it asks CUDA, which may hang too.
        if record := flight_record():
            files[1].write_bytes(record)


def _row(event: CommEvent) -> dict[str, Any]:
    return {
        "axis": event.axis,
        "op": event.op,
        "message_bytes": event.message_bytes,
        "dtype": str(event.dtype).removeprefix("torch."),
        "phase": event.phase,
        "place": f"{event.place[0]}:{event.place[1]}",
        "state": "complete" if event.is_complete else "reached" if event.is_reached else "launched",
    }
