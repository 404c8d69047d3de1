"""pretrain_gpt.py starts the laboratory in its place if the settings ask for a dry run or a check of streams."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

import pretrain_gpt
from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from lab.dryrun.__main__ import main
from lab.faults.runs import prepare_corpus
from lab.planner import depth
from lab.planner.plan import main as plan_main
from tests.end_to_end.runs import TINY_MODEL, options, run_on_rank
from tests.programs import ROOT, run_program, run_python, start_forked, wait_for_end
from tests.ranks import run_ranks

PROGRAM = str(ROOT.resolve() / "pretrain_gpt.py")


def run_in(folder: Path, *words: str) -> None:
    os.chdir(folder)
    run_program(*words)


def test_a_dry_run_starts_in_any_folder(tmp_path: Path):
    """It is of a CPU: for GPUs it would load torch's compiler too."""
    arguments = options(Path("unread"), Path("run"), dry_run__world_size=4, dry_run__backend="gloo")
    ended = start_forked(tmp_path / "said", run_in, tmp_path, "pretrain_gpt.py", *arguments)
    assert wait_for_end(ended) == 0, (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "run/report.json").read_text())["world_size"] == 4


def test_an_error_of_a_dry_run_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main(options(Path("unread"), Path("run"), dry_run__world_size=4, train__global_batch_size=6))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.global_batch_size=6" in line


def test_a_run_with_checked_streams_is_one_of_the_laboratory(monkeypatch: pytest.MonkeyPatch):
    arguments = options(Path("unread"), Path("run"), profile__check_streams=True)
    replaced = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(pretrain_gpt, "replace_process", replaced)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    with pytest.raises(SystemExit):
        pretrain_gpt.main()
    replaced.assert_called_once_with("lab.races", arguments)


@pytest.mark.full
def test_a_run_with_checked_streams_trains_and_says_so(tmp_path: Path):
    arguments = options(prepare_corpus(tmp_path), tmp_path / "run", train__steps=2, profile__check_streams=True)
    ended = run_python(PROGRAM, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("streams are checked for races") == 1
    assert [record["step"] for record in read_steps(tmp_path / "run")] == [1, 2]


def test_a_run_starts_from_the_settings_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(depth, "DEPTHS", (1, 2))
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "run/plan.yaml"
    cluster.write_text(
        (ROOT / "configs/clusters/dgx-2.yaml").read_text().replace("gpus_per_node: 16", "gpus_per_node: 2")
    )
    given = options(prepare_corpus(tmp_path), tmp_path / "run", zero__stage=2)
    tokens = 3 * 8 * TINY_MODEL["seq_length"]
    planner = (
        f"--cluster={cluster}",
        "--nodes=1",
        "--verify=1",
        f"--tokens={tokens}",
        "--free",
        "train.micro_batch_size",
    )
    plan_main([*planner, *given])
    assert parse_settings(["--config", str(plan)]).zero.stage == 2
    steps = run_ranks(2, run_on_rank, ["--config", str(plan)], init_process_group=False)[0]
    assert [record["step"] for record in steps] == [1, 2, 3]
