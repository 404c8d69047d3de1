"""Learning rates and batch sizes at points that can be computed by hand."""

from itertools import islice

import pytest

from gpt.settings.option_names import messages_in_option_names
from gpt.settings.schedule import (
    ScheduleConfig,
    batch_plan,
    check_batch_sizes,
    consumed_samples_after,
    global_batch_size,
    learning_rate,
)
from gpt.settings.training import RampUpConfig, TrainSettings
from parallel.validation.errors import ConfigError


def batches(micro_batch_size: int, global_batch_size: int, ramp_up: RampUpConfig | None = None) -> TrainSettings:
    return TrainSettings(micro_batch_size=micro_batch_size, global_batch_size=global_batch_size, ramp_up=ramp_up)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [  # learning rate at steps 0, 1, 4, 14, 19, 24 and 40 of 24, warm-up over 4
        ({"decay": "constant"}, [2, 4, 10, 10, 10, 10, 10]),
        ({"decay": "linear"}, [2, 4, 10, 6, 4, 2, 2]),
        ({"decay": "cosine"}, [2, 4, 10, 6, 2 + 4 * (1 - 0.5**0.5), 2, 2]),
        ({"decay": "linear", "decay_steps": 14}, [2, 4, 10, 2, 2, 2, 2]),
        ({"decay": "linear", "decay_steps": 4}, [2, 4, 2, 2, 2, 2, 2]),  # all of it is warm-up
        ({"decay": "wsd", "wsd_decay_steps": 10}, [2, 4, 10, 10, 6, 2, 2]),
        ({"decay": "wsd", "wsd_decay_steps": 5, "decay_steps": 19}, [2, 4, 10, 10, 2, 2, 2]),
    ],
)
def test_learning_rates(settings, expected):
    config = ScheduleConfig(min_lr=2, warmup_steps=4, **settings)
    rates = [learning_rate(config, 10, step, num_steps=24) for step in (0, 1, 4, 14, 19, 24, 40)]
    assert rates == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(ScheduleConfig(), 3e-4, step=0, num_steps=10) == 3e-4


def test_the_batch_grows_at_equal_intervals_and_then_stays():
    config = batches(2, 32, RampUpConfig(start=8, increment=8, samples=300))
    sizes = [global_batch_size(config, samples) for samples in (0, 99, 100, 199, 200, 299, 300, 10**9)]
    assert sizes == [8, 8, 16, 16, 24, 24, 32, 32]


def test_a_plan_resumed_anywhere_continues_the_same_plan():
    config = batches(2, 32, RampUpConfig(start=8, increment=8, samples=100))
    plan = list(islice(batch_plan(config), 20))
    assert plan[:6] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 16)]
    for step, (first_sample, _) in enumerate(plan):
        assert list(islice(batch_plan(config, first_sample), 20 - step)) == plan[step:]
        assert consumed_samples_after(config, step) == first_sample


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 50, 333])
@pytest.mark.parametrize("ramp_up", [None, (4, 4, 1), (8, 12, 1000), (2, 2, 100), (32, 5, 90), (2, 30, 7)])
def test_the_samples_of_a_run_are_the_sum_of_its_batches(ramp_up, num_steps):
    config = batches(2, 32, ramp_up and RampUpConfig(*ramp_up))
    assert consumed_samples_after(config, num_steps) == sum(size for _, size in islice(batch_plan(config), num_steps))


def test_the_samples_of_a_run_of_a_trillion_steps_are_counted_at_once():
    assert consumed_samples_after(batches(1, 4), 10**12) == 4 * 10**12
    assert consumed_samples_after(batches(1, 3, RampUpConfig(1, 2, 10**15)), 10**12) == 10**12


WSD, RAMPED = ScheduleConfig(0, 15, "wsd", wsd_decay_steps=8), batches(2, 16, RampUpConfig(6, 2, 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: learning_rate(ScheduleConfig(min_lr=1e-3), 1e-4, 0, 20), "min_lr=0.001 .* optimizer.lr=0.0001"),
        (
            lambda: learning_rate(ScheduleConfig(decay="wsd", wsd_decay_steps=101), 1.0, 0, 100),
            "schedule.wsd_decay_steps=101 is above the 100 steps .*; choose 100 or less",
        ),
        (lambda: ScheduleConfig(decay="wsd"), "schedule.wsd_decay_steps=null, .*decay=wsd"),
        (lambda: learning_rate(ScheduleConfig(warmup_steps=30), 1, 0, 20), "warmup_steps=30 is above the 20 steps"),
        (lambda: learning_rate(WSD, 1, 0, 20), "schedule.warmup_steps=15 is above the 12 steps"),
        (lambda: batches(1, 30, RampUpConfig(8, 8, 10)), "batch_size=30 .*ramp_up.start=8 .*.increment=8"),
        (lambda: check_batch_sizes(batches(4, 30), 2), "batch_size=30 .*micro_batch_size=4 x 2 .* = 8; choose 32"),
        (lambda: check_batch_sizes(RAMPED, 4), "train.ramp_up.start=6 is not divisible by .* = 8; choose 8"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ConfigError, match=message), messages_in_option_names():
        make()


def test_batches_that_divide_are_accepted():
    check_batch_sizes(batches(2, 32, RampUpConfig(8, 8, 100)), data_size=4)
    check_batch_sizes(batches(2, 32, RampUpConfig(32, 5, 100)), data_size=4)
