"""Settings of a run are translated to options of the process of a rank."""

import sys
from pathlib import Path
from unittest import mock

import pytest

from gpt.builder.train_state import start_options
from gpt.settings.option_names import in_option_names
from gpt.settings.parser import parse_settings
from pretrain_gpt import main
from tests.unit.gpt.settings.test_settings import BASE


@pytest.mark.parametrize(
    ("tensor_size", "stage", "expected"), [(1, 0, False), (1, 2, False), (2, 0, True), (2, 2, True), (2, 3, False)]
)
def test_one_queue_of_launches_is_for_tensor_groups_that_keep_their_parameters(tensor_size, stage, expected):
    arguments = [f"--config={BASE}", f"--parallel.tensor_size={tensor_size}", f"--zero.stage={stage}"]
    assert start_options(parse_settings(arguments)).orders_launches == expected
    assert not start_options(parse_settings([*arguments, "--offload.mode=host"])).orders_launches


def test_the_device_the_time_limit_and_the_folder_are_those_of_the_run():
    arguments = ["--run.device=cpu", "--run.hang_seconds=7", "--run.dir=runs/a"]
    options = start_options(parse_settings([f"--config={BASE}", *arguments]))
    assert (options.device, options.hang_seconds, options.record_folder) == ("cpu", 7, Path.cwd() / "runs/a")
    assert not options.fixes_kernels
    assert start_options(parse_settings([f"--config={BASE}", "--train.reproducible=layout"])).fixes_kernels
    assert in_option_names("choose StartOptions.device=cpu") == "choose run.device=cpu"


@pytest.mark.parametrize(("rank", "is_quiet"), [(0, False), (1, True)])
def test_only_the_first_rank_prints(rank, is_quiet, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--help"])
    with mock.patch("pretrain_gpt.RunConsole") as console, pytest.raises(SystemExit):
        main()
    console.assert_called_once_with(is_quiet=is_quiet)
