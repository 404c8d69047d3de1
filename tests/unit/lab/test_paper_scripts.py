"""The search for the largest model on a cluster, with a stub that decides which runs fit."""

import json
from pathlib import Path

import pytest

from gpt.run_folder.files import NUMBERS_OF_A_STEP
from lab.paper.experiments import CONFIGS
from lab.paper.largest import main
from lab.planner.search import largest
from parallel.validation.errors import ConfigError


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


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stub that trains up to 7 layers, runs out of memory above, and fails for another reason at 40."""
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
    return stub


def search(launch: Path, capsys: pytest.CaptureFixture[str], first: str, *options: str, figure: str = "figure6") -> str:
    """Return what the search of an experiment prints, whose name two figures have."""
    main([str(CONFIGS / figure / "40b-c1-400.yaml"), first, "--launch", str(launch), *options])
    return capsys.readouterr().out


def test_largest_sh_reads_what_runs_leave_behind(launch, tmp_path, capsys):
    found = search(launch, capsys, "4")
    assert found.splitlines()[-1] == "7 layers are the most that fit"
    (folder,) = (tmp_path / "runs/paper/largest").iterdir()
    records = (folder / "8/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[0])["out_of_memory"]
    launch.write_text("#!/bin/sh\nexit 1\n")
    assert search(launch, capsys, "4") == found, "what has been tried is not tried again"
    with pytest.raises(ConfigError, match="the run of 40 layers ended neither trained nor out of memory"):
        search(launch, capsys, "40")
    cut = folder / "41/metrics.jsonl"
    cut.parent.mkdir()
    cut.write_text('{"step": 1, "lo')  # by a crash
    with pytest.raises(ConfigError, match="the run of 41 layers ended neither"):
        search(launch, capsys, "41")
    launch.unlink()
    with pytest.raises(FileNotFoundError, match=str(launch)):
        search(launch, capsys, "42")


def test_largest_sh_takes_no_outcome_of_another_experiment(launch, capsys):
    search(launch, capsys, "4")
    launch.write_text(launch.read_text().replace("layers <= 7", "layers <= 9"))
    for of_other in ({"figure": "figure7"}, {"options": ["--zero.stage", "2"]}, {"options": ["--nodes", "8 of 16"]}):
        found = search(launch, capsys, "4", *of_other.get("options", []), figure=of_other.get("figure", "figure6"))
        assert found.splitlines()[-1] == "9 layers are the most that fit", of_other
    assert search(launch, capsys, "4").splitlines()[-1] == "7 layers are the most that fit"
