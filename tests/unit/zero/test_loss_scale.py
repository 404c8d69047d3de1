"""The trajectory of the loss scale, step by step."""

import pytest
import torch

from zero.loss_scale import LossScale

# (growth interval, hysteresis, initial scale, a letter per step: o overflowed, g good; the scale after each)
TRAJECTORIES = [
    (3, 1, 8.0, "oogggggg", [4, 2, 2, 2, 4, 4, 4, 8]),
    (3, 1, 8.0, "ggogggo", [8, 8, 4, 4, 4, 8, 4]),  # an overflow restarts the count of good steps
    (3, 2, 8.0, "ogogoo", [8, 8, 8, 8, 8, 4]),  # only overflows in a row count
    (3, 2, 8.0, "oooog", [8, 4, 2, 1, 1]),  # after the hysteresis every further one halves it
    (2, 3, 8.0, "ooogoooggoo", [8, 8, 4, 4, 4, 4, 2, 2, 4, 4, 4]),
    (1, 1, 1.0, "gggo", [2, 4, 8, 4]),
    (9, 1, 2.5, "ooo", [1.25, 1, 1]),  # never below 1
]


@pytest.mark.parametrize(("growth_interval", "hysteresis", "initial", "steps", "expected"), TRAJECTORIES)
def test_the_scale_takes_exactly_these_values(growth_interval, hysteresis, initial, steps, expected):
    loss_scale = LossScale(initial, is_dynamic=True, growth_interval=growth_interval, hysteresis=hysteresis)
    found = []
    for step in steps:
        loss_scale.update(torch.tensor(float(step == "o")))
        found.append(loss_scale.scale.item())
    assert found == expected


def test_a_static_scale_stays():
    loss_scale = LossScale(128.0)
    for found_inf in (1.0, 1.0, 0.0, 1.0):
        loss_scale.update(torch.tensor(found_inf))
    assert loss_scale.scale.item() == 128.0


def test_a_loaded_state_continues_as_the_saved_one():
    first, second = (LossScale(2.0**initial, is_dynamic=True, growth_interval=3) for initial in (4, 9))
    for step in "ogg":
        first.update(torch.tensor(float(step == "o")))
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for step in "ggoogggg":
        for loss_scale in (first, second):
            loss_scale.update(torch.tensor(float(step == "o")))
        assert first.scale.item() == second.scale.item()
