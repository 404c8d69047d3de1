"""The search for the largest model on a cluster, with a stub that decides which runs fit."""

import json

import pytest

from gpt.run_folder.files import NUMBERS_OF_A_STEP
from lab.paper.largest import main
from lab.planner.search import largest


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("first", [1, 5, 20, 50])
def test_the_search_ends_at_the_largest_that_fits_and_tries_nothing_twice(first, step):
    for limit in range(60):
        tried = []

        def fits(num_layers: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(num_layers)
            return num_layers <= limit

        possible = range(first % step or step, limit + 1, step)
        assert largest(fits, first, step) == max(possible, default=0)
        assert len(set(tried)) == len(tried) < 16
        assert min(tried) >= 1


def test_largest_sh_reads_what_runs_leave_behind(tmp_path, monkeypatch, capsys):
    """The stub trains up to 7 layers, runs out of memory above, and fails for another reason at 40."""
    stub = tmp_path / "launch"
    stub.write_text(
        """#!/usr/bin/env python3
import json, pathlib, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
layers, folder = int(given["--model.num_layers"]), pathlib.Path(given["--run.dir"])
numbers = dict.fromkeys(NUMBERS, 1.0)
folder.mkdir(parents=True)
records = [numbers | {"step": n} for n in (1, 2, 3)] if layers <= 7 else [{"step": 0, "out_of_memory": True}]
if layers != 40:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + chr(10) for record in records))
""".replace("NUMBERS", str(sorted(NUMBERS_OF_A_STEP)))
    )
    stub.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    def search(first: str) -> str:
        main(["c4.yaml", first, "--launch", str(stub)])
        return capsys.readouterr().out

    found = search("4")
    assert found.splitlines()[-1] == "7 layers are the most that fit"
    records = (tmp_path / "runs/paper/largest/c4-8/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[0])["out_of_memory"]
    stub.write_text("#!/bin/sh\nexit 1\n")
    assert search("4") == found, "what has been tried is not tried again"
    with pytest.raises(SystemExit, match="2"):
        search("40")
    assert "the run of 40 layers ended neither trained nor out of memory" in capsys.readouterr().err
    cut = tmp_path / "runs/paper/largest/c4-41/metrics.jsonl"
    cut.parent.mkdir()
    cut.write_text('{"step": 1, "lo')  # by a crash
    with pytest.raises(SystemExit, match="2"):
        search("41")
    assert "the run of 41 layers ended neither" in capsys.readouterr().err
    stub.unlink()
    with pytest.raises(SystemExit, match="2"):
        search("42")
    assert f"error: [Errno 2] No such file or directory: '{stub}'\n" in capsys.readouterr().err
