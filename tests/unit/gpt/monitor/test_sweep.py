"""The recipe of a sweep starts runs that the parser reads, each in a folder of its own."""

import os
import subprocess

import yaml

from gpt.settings.parser import parse_settings
from tests.source_files import ROOT


def test_a_sweep_starts_a_run_with_the_settings_that_it_tries(tmp_path, monkeypatch):
    sweep = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    tried = {name: p["min"] if "min" in p else p["values"][0] for name, p in sweep["parameters"].items()}
    # As W&B's agent does: the options replace ${args}, and the id of the run is in the environment.
    options = [f"--{name}={value}" for name, value in tried.items()]
    command = [part for word in sweep["command"] for part in (options if word == "${args}" else [word])]
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_RUN_ID": "abc"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    monkeypatch.chdir(ROOT)
    settings = parse_settings(printed[printed.index("pretrain_gpt.py") + 1 :])
    assert (settings.run.dir, settings.wandb.mode) == ("runs/sweep/abc", "online")
    found = {name: getattr(getattr(settings, name.split(".")[0]), name.split(".")[1]) for name in tried}
    assert found == tried
    assert settings.train.eval_every > 0
    assert sweep["metric"]["name"] == "validation_loss"
