"""The configurations of configs/gpt, from 124M to 175B parameters."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpt.builder.closed_forms import parameters_of_rank
from gpt.settings.parser import parse_settings
from gpt.settings.schedule import check_batch_sizes
from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import extrapolate, shallow_runs
from tests.source_files import ROOT

SIZES = sorted((ROOT / "configs/gpt").glob("*.yaml"))
LLAMAS = [ROOT / f"configs/models/llama-3-{size}.yaml" for size in ("1b", "3b")]
CLUSTERS = ["dgx-a100", "dgx-h100"]


def settings_and_ranks(path: Path) -> tuple[Settings, int]:
    """Return the settings, and the least number of GPUs, which the first line of the file says."""
    found = re.match(r"# .* of [\d.]+[MB] parameters,.* for (\d+) or more GPUs", path.read_text())
    assert found is not None
    return parse_settings(["--config", str(path)]), int(found[1])


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
def test_a_size_has_the_parameters_of_its_name_and_divides_over_its_ranks(path: Path):
    settings, num_ranks = settings_and_ranks(path)
    number, unit = float(path.stem[:-1]), {"m": 1e6, "b": 1e9}[path.stem[-1]]
    # Chinchilla has relative positions, too.
    assert parameters_of_rank(settings.model, 1) == pytest.approx(number * unit, rel=0.08)
    check_batch_sizes(settings.train, num_ranks // settings.parallel.tensor_size)
    assert settings.schedule.min_lr == pytest.approx(settings.optimizer.lr / 10)
    assert settings.run.dir == f"runs/gpt-{path.stem}"
    assert settings.checkpoint.every == settings.train.eval_every > 0, "else nothing is left of a run that fails"


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"), [("nanogpt-124m", 124e6, 2.67e9), ("nanochat-d20", 561e6, 11.2e9)]
)
def test_a_recipe_has_the_parameters_and_tokens_of_its_record(name: str, parameters: float, tokens: float):
    settings = parse_settings(["--config", str(ROOT / f"configs/speedrun/{name}.yaml")])
    assert parameters_of_rank(settings.model, 1) == pytest.approx(parameters, rel=4e-3)
    tokens_of_step = settings.train.global_batch_size * settings.model.seq_length
    assert tokens_of_step == 2**19
    assert settings.train.steps * tokens_of_step == pytest.approx(tokens, rel=2e-3)
    check_batch_sizes(settings.train, 8)


@pytest.mark.full
@pytest.mark.parametrize("path", SIZES + LLAMAS, ids=lambda path: path.stem)
def test_a_size_fits_its_gpus(path: Path):
    settings, num_ranks = settings_and_ranks(path)
    data_size = num_ranks // settings.parallel.tensor_size
    train = replace(settings.train, compile="none", global_batch_size=2 * settings.train.micro_batch_size * data_size)
    settings = replace(settings, train=train, dry_run=replace(settings.dry_run, world_size=num_ranks))
    runs = shallow_runs(settings)
    for name in CLUSTERS:
        cluster = ClusterSpec.load(ROOT / f"configs/clusters/{name}.yaml")
        estimate = extrapolate(runs, cluster).at(settings.model.num_layers)
        assert estimate.device_peak_bytes <= cluster.usable_gpu_bytes
