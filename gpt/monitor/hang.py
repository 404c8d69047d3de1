"""Reports in run.dir/hang if the job hangs: the last collectives of each rank, and the record that NCCL keeps of them.

rank-3.json         the collectives that were launched last: axis, operation, bytes, type, place in the code, and state
nccl_trace_rank_3   torch's flight record, on GPUs: `torchfrtrace --prefix nccl_trace_rank_ run.dir/hang` compares ranks
"""

import json
from pathlib import Path
from typing import Any

from gpt.run_folder.files import HANG, written_if_possible
from parallel.comm_log import CommEvent, CommLog
from parallel.process_defaults import FLIGHT_RECORD
from parallel.torch_internals import flight_record

NUM_LAST = 50


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
        (folder / f"rank-{rank}.json").write_text(json.dumps(report, indent=1) + "\n")
        # Last, because it asks CUDA, which may hang too.
        if record := flight_record():
            (folder / f"{FLIGHT_RECORD}{rank}").write_bytes(record)


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
