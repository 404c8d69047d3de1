"""A rank of a job that hangs leaves its last collectives."""

import json
from pathlib import Path

import torch

from gpt.monitor.watch import write_hang_report
from parallel.comm_log import CommLog
from parallel.mesh import Mesh
from tests.ranks import run_ranks


def report_of_rank(folder: Path) -> dict:
    """The report of a rank that has waited for 60 of its 61 collectives."""
    mesh = Mesh.create(tensor_size=1)
    words = torch.zeros(2, dtype=torch.float16)
    for _ in range(60):
        mesh.data.all_reduce(words, out=words).wait()
    with mesh.log.during("backward"):
        gathered = mesh.data.all_gather(words, out=torch.zeros(4, dtype=torch.float16))
    write_hang_report(folder, mesh.rank, mesh.log, "rank 1 does not answer")
    gathered.wait()
    return json.loads((folder / "hang" / f"rank-{mesh.rank}.json").read_text())


def test_each_rank_leaves_its_last_50_collectives_with_their_places_and_states(tmp_path):
    for report in run_ranks(2, report_of_rank, tmp_path):
        counts = [report[f"num_{what}"] for what in ("launched", "reached", "complete")]
        assert (report["reason"], counts) == ("rank 1 does not answer", [61, 61, 60])
        *earlier, last = report["collectives"]
        assert [row["number"] for row in earlier] == list(range(12, 61))
        assert {row["state"] for row in earlier} == {"complete"}
        place = last.pop("place")
        assert place.startswith(f"{__file__}:")
        assert last == {
            "number": 61,
            "axis": "data",
            "op": "all_gather",
            "message_bytes": 8,
            "dtype": "float16",
            "phase": "backward",
            "state": "reached",
        }


def test_a_host_that_ran_ahead_of_its_device_reports_what_the_device_was_doing(tmp_path):
    log = CommLog()
    for number in range(200):
        event = log.record("all_reduce", "data", 2, torch.zeros(1))
        if number < 100:
            log.record_wait_end(event)
    write_hang_report(tmp_path, 0, log, "")
    rows = json.loads((tmp_path / "hang" / "rank-0.json").read_text())["collectives"]
    assert (rows[0]["number"], rows[-1]["number"]) == (75, 200)
