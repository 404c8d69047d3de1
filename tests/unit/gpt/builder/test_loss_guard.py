"""The loss guard: bad losses are found on the device, without the host reading a value."""

import math

import pytest
import torch

from gpt.builder.loss_guard import LossGuard, RollBacks, SkippedInARow
from gpt.settings.run import GuardSettings
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError

NUM_FOR_A_MEAN = 20  # losses before one can be a spike


def judged(losses: list[float], spike_factor: float | None) -> list[float]:
    guard = LossGuard(Axis.trivial("data"), spike_factor)
    found = [guard.judge(torch.tensor(loss)).item() for loss in losses]
    assert guard.num_bad.item() == sum(found)
    return found


def test_losses_that_are_not_finite_are_bad_from_the_first_step_on():
    assert judged([math.nan, 3.0, math.inf, 3.0, -math.inf], None) == [1, 0, 1, 0, 1]


def test_a_spike_is_bad_and_does_not_enter_the_mean():
    steady = [10.0 - 0.1 * step for step in range(NUM_FOR_A_MEAN)]
    assert judged([*steady, 30.0, 30.0, 9.0, 30.0], 2.0) == [0] * NUM_FOR_A_MEAN + [1, 1, 0, 1]
    assert judged([*steady, math.nan, 30.0, 9.0], 2.0) == [0] * NUM_FOR_A_MEAN + [1, 1, 0]
    assert judged([*steady, 30.0], None) == [0] * (NUM_FOR_A_MEAN + 1)


def test_nothing_is_a_spike_before_there_is_a_mean():
    assert judged([1.0, 50.0, 1.0], 2.0) == [0, 0, 0]


def test_the_mean_continues_after_a_resume():
    losses = torch.linspace(5, 4, 30)
    whole, first, second = (LossGuard(Axis.trivial("data"), 1.05) for _ in range(3))
    for loss in losses:
        whole.judge(loss)
    for loss in losses[:15]:
        first.judge(loss)
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for loss in losses[15:]:
        second.judge(loss)
    assert {name: t.item() for name, t in second.state().items()} == {n: t.item() for n, t in whole.state().items()}


def test_many_skipped_steps_in_a_row_end_the_run():
    skipped = SkippedInARow(20, step=100, num_skipped=7)
    skipped.check(110, 17)
    skipped.check(120, 26)  # one of these steps was not skipped
    skipped.check(130, 36)
    with pytest.raises(ConfigError, match=r"the last 20 steps, up to step 140, .*guard.max_skipped_steps=20; lower"):
        skipped.check(140, 46)
    endless = SkippedInARow(None, step=0, num_skipped=0)
    endless.check(1000, 1000)


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ("roll_back", [False, True, False, True, "9: 5 .*=2.0, after 2 of 2 roll-backs"]),
        ("stop", [False, "9: 1 "]),
        ("skip", [False, False, False, False, False]),
    ],
)
def test_bad_losses_since_the_last_logged_step_roll_a_run_back_or_end_it(policy: str, found: list[bool | str]):
    guard = LossGuard(Axis.trivial("data"), 2.0)
    roll_backs = RollBacks(GuardSettings(policy=policy, spike_factor=2.0, max_roll_backs=2), guard)
    assert not RollBacks(GuardSettings(), None).is_due(9)
    for num_bad, expected in zip((0, 1, 1, 4, 5), found, strict=False):
        guard.num_bad.fill_(num_bad)
        if isinstance(expected, str):
            with pytest.raises(ConfigError, match=f"bad losses by step {expected}.*guard.policy={policy}"):
                roll_backs.is_due(9)
        else:
            assert roll_backs.is_due(9) is expected
