"""pretrain_gpt.py starts the laboratory in its place if the settings ask for a dry run or a check of streams."""

import json
import subprocess
import sys
from pathlib import Path

from gpt.run_folder.files import read_steps
from tests.end_to_end.runs import options, prepare_corpus

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, and return its outcome."""
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)


def test_a_dry_run_starts_in_any_folder_and_an_error_is_one_line(tmp_path: Path):
    arguments = options(Path("unread"), Path("run"), dry_run__world_size=4)
    ended = started(tmp_path, str(PROGRAM), *arguments)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run/report.json").read_text())["world_size"] == 4
    refused = started(tmp_path, str(PROGRAM), *arguments, "--train.global_batch_size=6")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "train.global_batch_size=6" in line


def test_two_ranks_train_with_checked_streams_under_torchrun(tmp_path: Path):
    arguments = options(prepare_corpus(tmp_path), tmp_path / "run", train__steps=2, profile__check_streams=True)
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
    ended = started(tmp_path, *launcher, str(PROGRAM), *arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("streams are checked for races") == 1
    assert [record["step"] for record in read_steps(tmp_path / "run")] == [1, 2]
