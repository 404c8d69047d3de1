"""A ladder of sizes: what it trains, what it fits, what it predicts."""

import argparse
import json
import math
from pathlib import Path

import pytest

from gpt.settings.parser import parse_settings
from lab import ladder
from lab.ladder import PowerLaw
from parallel.validation.errors import ConfigError
from tests.unit.lab.stub_launch import write_launch

CONFIG = "--config", "configs/quickstart.yaml"


def run(folder: Path, losses: dict[str, float], *options: str) -> None:
    launch = write_launch(folder, {size: [loss] for size, loss in losses.items()})
    own = ["--output", str(folder / "runs"), "--launch", launch]
    ladder.main([*own, "--tokens_per_parameter", "0.1", *options, "--", *CONFIG])


def test_the_largest_size_is_predicted_before_it_is_trained_and_no_run_is_repeated(tmp_path, capsys):
    sizes = "--sizes", "2x32", "1x16", "1x32"
    options = argparse.Namespace(output=tmp_path, head_size=32, mup_base_width=None, tokens_per_parameter=0.1)
    flops = {size: ladder.rung(size, options, CONFIG).flops for size in sizes[1:]}
    losses = {size: 50 * number**-0.1 * (1.02 if size == "2x32" else 1) for size, number in flops.items()}
    run(tmp_path, losses, *sizes)
    said = capsys.readouterr()
    assert [line.split("run.dir=")[1].split()[0] for line in said.err.splitlines() if line.startswith("+ ")] == [
        f"{tmp_path}/runs/{size}" for size in ("1x16", "1x32", "2x32")
    ]
    predicted, trained = [float(line.split(": ")[2].split()[0].rstrip(",")) for line in said.out.splitlines()[:2]]
    assert trained / predicted == pytest.approx(1.02, abs=1e-3)
    assert (tmp_path / "runs" / "ladder.png").stat().st_size > 0
    metrics = tmp_path / "runs" / "1x32" / "metrics.jsonl"
    step = json.loads(metrics.read_text())
    settings = parse_settings(CONFIG)
    tokens = step["step"] * settings.train.global_batch_size * settings.model.seq_length
    assert tokens == pytest.approx(0.1 * (8192 * 32 + 128 * 32 + 12 * 32**2 + 15 * 32), rel=0.1)  # parameters
    run(tmp_path, losses, *sizes)
    assert "+ " not in capsys.readouterr().err


def test_a_batch_that_grows_has_fewer_tokens_and_flops(tmp_path):
    ramp_up = "--train.ramp_up", "{start: 8, increment: 8, samples: 400}", "--train.global_batch_size", "16"
    options = argparse.Namespace(output=tmp_path, head_size=32, mup_base_width=None, tokens_per_parameter=20.0)
    plain, growing = (ladder.rung("1x32", options, (*CONFIG, *more)) for more in ((), ramp_up))
    assert growing.flops == pytest.approx(plain.flops, rel=0.01)
    assert growing.samples == sum(8 if step < 50 else 16 for step in range(growing.run.settings.train.steps))


def test_a_power_law_is_found_with_the_error_of_a_prediction():
    flops = [10.0**power for power in (12, 13, 14, 15)]
    exact = PowerLaw(tuple(flops), tuple(30 * number**-0.07 for number in flops))
    assert exact.predict(1e16) == (pytest.approx(30 * 1e16**-0.07), pytest.approx(0.0, abs=1e-6))
    assert math.isnan(PowerLaw((1e12, 1e13), (4.0, 3.5)).predict(1e14)[1])
    noisy = PowerLaw(
        (1e12, 1e13, 1e14), tuple(30 * c**-0.07 * f for c, f in zip(flops, (1.01, 0.98, 1.01), strict=False))
    )
    # residuals of log L: (d, -2d, d) with d = log(1.01 / 0.98) / 3; x is two steps beyond the mean of three.
    d = math.log(1.01 / 0.98) / 3
    loss, error = noisy.predict(1e15)
    assert error / loss == pytest.approx(math.sqrt(6 * d**2 * (1 + 1 / 3 + 4 / 2)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sizes", "1x8", "1x16"], "has 2 sizes"),
        (["--sizes", "1x8", "1x8", "1x16"], "has 2 sizes"),
        (["--sizes", "a", "1x8", "2x8"], "a is not LAYERS"),
        (["--head_size", "0"], "--head_size=0 is below 1"),
        (["--tokens_per_parameter", "nan"], "a run of nan tokens"),
    ],
)
def test_what_cannot_be_a_ladder_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, {}, *options)
