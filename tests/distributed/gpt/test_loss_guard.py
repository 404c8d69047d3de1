"""The loss guard on several ranks: all judge the mean over ranks, and so all judge alike."""

import math

import pytest
import torch
import torch.distributed as dist

from gpt.builder.loss_guard import LossGuard
from parallel.mesh import Mesh
from tests.ranks import run_ranks


def judged(steps: list[list[float]]) -> tuple[list[float], float]:
    """Return this rank's verdict on each step, given the losses of all ranks, and the mean of the good ones."""
    guard = LossGuard(Mesh.create(1).data, spike_factor=2.0)
    before = torch.tensor([losses[dist.get_rank()] for losses in steps], dtype=torch.float64)
    losses = before.clone()
    verdicts = [guard.judge(loss).item() for loss in losses]
    torch.testing.assert_close(losses, before, rtol=0, atol=0, equal_nan=True)  # still this rank's own
    return verdicts, guard.state()["mean"].item()


def test_one_bad_rank_of_two_is_bad_on_both_and_a_good_mean_on_neither():
    steady = [[3.0, 5.0]] * 20
    odd = [[4.0, math.nan], [math.inf, 4.0], [-math.inf, math.inf], [1.0, 30.0], [30.0, 1.0], [0.5, 15.0], [15.0, 0.5]]
    first, second = run_ranks(2, judged, steady + odd)
    assert first == second
    verdicts, mean = first
    assert verdicts == [0] * 20 + [1, 1, 1, 1, 1, 0, 0]  # 15 alone is far above twice the mean; 7.75 is not
    # Of the mean over ranks, not of their sum; the weights of losses are in fp32.
    assert mean == pytest.approx((20 * 4 + 2 * 7.75) / 22, rel=1e-6)
