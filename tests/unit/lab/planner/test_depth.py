"""Extrapolation from two depths: which shallow models are run, and how many layers fit."""

import math
from dataclasses import replace

import pytest

from gpt.builder.closed_forms import parameters_of_rank
from lab.planner.depth import DepthExtrapolation, Estimate, shallow_settings
from tests.unit.lab.dryrun.test_projection import shallow


def line(device: tuple[float, float], host: tuple[float, float]) -> DepthExtrapolation:
    """Return an extrapolation from 2 and 4 layers, with (bytes without layers, bytes of a layer)."""
    estimates = [
        Estimate(10.0 * layers, device[0] + device[1] * layers, host[0] + host[1] * layers, 0.5 * layers)
        for layers in (2, 4)
    ]
    return DepthExtrapolation((2, 4), (estimates[0], estimates[1]))


def test_a_deep_model_is_on_the_line_through_two_shallow_ones():
    assert line((10, 2), (5, 1)).at(9) == Estimate(90.0, 28.0, 14.0, 4.5)
    assert line((10, 2), (5, 1)).at(0) == Estimate(0.0, 10.0, 5.0, 0.0)


@pytest.mark.parametrize(
    ("host", "device_bytes", "host_bytes", "num_layers"),
    [
        ((5, 1), 20, math.inf, 5),
        ((5, 1), 21.9, math.inf, 5),
        ((5, 1), 20, 8, 3),
        ((5, 2), 20, 9, 2),
        ((5, 1), 20, 100, 5),
        ((5, 0), 20, 6, 5),  # no layer needs memory of the host
        ((5, 1), 11.9, math.inf, 0),
        ((5, 1), 4, math.inf, 0),
        ((5, 1), 20, 1, 0),
    ],
)
def test_the_most_layers_are_those_that_fit_the_device_and_the_host(
    host: tuple[float, float], device_bytes: float, host_bytes: float, num_layers: int
):
    assert line((10, 2), host).max_layers(device_bytes, host_bytes) == num_layers


@pytest.mark.parametrize(
    ("num_layers", "group", "depths"),
    [(7, 1, (4, 8)), (7, 3, (7, 10)), (8, 4, (4, 8)), (12, 5, (7, 12)), (3, 4, (7, 11))],
)
def test_shallow_models_have_the_last_checkpoint_and_the_buckets_of_the_deep_one(
    num_layers: int, group: int, depths: tuple[int, int]
):
    chosen = shallow(f"--model.num_layers={num_layers}", f"--activations.layers_per_checkpoint={group}")
    chosen = replace(chosen, zero=replace(chosen.zero, stage=1, bucket_numel="auto"))
    chosen = replace(chosen, model=replace(chosen.model, hidden_size=1024))
    runs = shallow_settings(chosen)
    assert tuple(run.model.num_layers for run in runs) == depths
    for settings, num_layers in zip(runs, depths, strict=True):
        assert settings.model == replace(chosen.model, num_layers=num_layers)
        whole = parameters_of_rank(chosen.model, 2)
        # Buckets of stage 1 are eighths of the gradients, between the sizes that suit two data ranks.
        assert settings.zero.bucket_numel == chosen.zero.chosen_bucket_numel(whole, 2, chosen.train.dtype)
