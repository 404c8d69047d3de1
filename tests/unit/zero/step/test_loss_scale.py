"""The trajectory of the loss scale, step by step, and the reports of skipped steps."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero.core.step.loss_scale import LossScale, SkippedSteps, SkippedStepsError

CPU = torch.device("cpu")

# (growth interval, hysteresis, initial scale, a letter per step: o overflowed, g good; the scale after each)
TRAJECTORIES = [
    (3, 1, 8.0, "oogggggg", [4, 2, 2, 2, 4, 4, 4, 8]),
    (3, 1, 8.0, "ggogggo", [8, 8, 4, 4, 4, 8, 4]),  # an overflow restarts the count of good steps
    (3, 2, 8.0, "ogogoo", [8, 8, 8, 8, 8, 4]),  # only overflows in a row count
    (3, 2, 8.0, "oooog", [8, 4, 2, 1, 1]),  # after the hysteresis every further one halves it
    (2, 3, 8.0, "ooogoooggoo", [8, 8, 4, 4, 4, 4, 2, 2, 4, 4, 4]),
    (1, 1, 1.0, "gggo", [2, 4, 8, 4]),
    (9, 1, 2.5, "ooo", [1.25, 1, 1]),  # never below 1
    (1, 1, 2.0**125, "gggo", [2.0**126, 2.0**126, 2.0**126, 2.0**125]),  # nor above what has an inverse
]


@pytest.mark.parametrize(("growth_interval", "hysteresis", "initial", "steps", "expected"), TRAJECTORIES)
def test_the_scale_takes_exactly_these_values(growth_interval, hysteresis, initial, steps, expected):
    loss_scale = LossScale(initial, is_dynamic=True, growth_interval=growth_interval, hysteresis=hysteresis)
    found = []
    for step in steps:
        loss_scale.update(torch.tensor(float(step == "o")))
        found.append(loss_scale.scale.item())
    assert found == expected


def test_by_default_a_scale_stays_and_a_dynamic_one_changes_after_two_overflows_or_a_thousand_good_steps():
    static, dynamic = LossScale(), LossScale(8.0, is_dynamic=True)
    found = []
    for step in "oo" + 1000 * "g":
        for scale in (static, dynamic):
            scale.update(torch.tensor(float(step == "o")))
        found.append((static.scale.item(), dynamic.scale.item()))
    assert found == [(1, 8)] + 1000 * [(1, 4)] + [(1, 8)]


def record_all(watch: SkippedSteps, steps: str) -> None:
    for step in steps:
        watch.record(torch.tensor(float(step == "o")), torch.tensor(0.0))


def test_skipped_steps_raise_at_the_limit_and_warn_of_the_first_in_a_row():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_all(SkippedSteps(CPU, limit=None, warns=False), "gooooo")
        watch = SkippedSteps(CPU, limit=2, warns=False)
        record_all(watch, "gogo")
        with pytest.raises(SkippedStepsError, match=r"the last 2 steps, from step 4 .*max_skipped_in_a_row=2"):
            record_all(watch, "o")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record_all(SkippedSteps(CPU, limit=4, warns=True), "googooo")
    assert [str(warning.message)[:11] for warning in caught] == ["step 2 of t", "step 5 of t"]


class CopiesToHost(TorchDispatchMode):
    """A mode that notes, for each copy of a tensor from `meta` to host memory, whether the host goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_to_copy" and kwargs.get("device") == CPU:
            self.go_on.append(kwargs.get("non_blocking", False))
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if name == "copy_" and args[0].device == CPU != args[1].device:
            self.go_on.append(args[2:] == (True,))
            return args[0]
        return func(*args, **kwargs)


def test_the_host_does_not_wait_for_the_counter_of_skipped_steps():
    with CopiesToHost() as copies:
        SkippedSteps(torch.device("meta"), limit=1, warns=True).record(*2 * [torch.ones((), device="meta")])
    assert copies.go_on == [True]
