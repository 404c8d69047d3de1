"""The closed forms of memory and traffic against the paper's tables and sentences."""

from dataclasses import replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from zero.core.partition.stage import STAGES, Division
from zero.formulas.memory import ModelStates, formula, placed
from zero.formulas.traffic import axis_bytes, axis_sizes

# Table 1 of the paper: GB of model states per GPU, as printed, some rounded and some truncated.
TABLE_1 = """
 DP | 7.5B: Pos Pos+g Pos+g+p | 128B                | 1T
  1 | 120       120   120     | 2048    2048   2048 | 16000   16000  16000
  4 | 52.5      41.3  30      | 896     704    512  | 7000    5500   4000
 16 | 35.6      21.6  7.5     | 608     368    128  | 4750    2875   1000
 64 | 31.4      16.6  1.88    | 536     284    32   | 4187    2218   250
256 | 30.4      15.4  0.47    | 518     263    8    | 4046    2054   62.5
1024| 30.1      15.1  0.12    | 513     257    2    | 4011    2013   15.6
"""
NUM_PARAMETERS = (7.5e9, 128e9, 1e12)


def cells() -> list[tuple[int, float, int, str]]:
    """Return (data size, parameters, stage, printed GB) of every cell."""
    found = []
    for line in TABLE_1.strip().splitlines()[1:]:
        data_size, *models = line.split("|")
        for num_parameters, printed in zip(NUM_PARAMETERS, models, strict=True):
            found += [(int(data_size), num_parameters, stage, gb) for stage, gb in enumerate(printed.split(), start=1)]
    assert len(found) == 54
    return found


@pytest.mark.parametrize(("data_size", "num_parameters", "stage", "printed"), cells())
def test_table_1(data_size, num_parameters, stage, printed):
    gb = Decimal(formula(STAGES[stage], num_parameters, data_size).total) / 10**9
    digits = Decimal(printed)
    assert digits in (gb.quantize(digits, ROUND_HALF_UP), gb.quantize(digits, ROUND_DOWN))


def test_figure_1_by_kind():
    """7.5 billion parameters, K = 12, on 64 ranks."""
    states = formula(STAGES[2], 7.5e9, 64)
    assert (states.parameters, states.gradients) == (15e9, 15e9 / 64)
    assert (states.master, states.moments) == (30e9 / 64, 60e9 / 64)


@pytest.mark.parametrize(("stage", "expected"), [(0, 16), (1, 8 + 8 / 4), (2, 4 + 12 / 4), (3, 16 / 4)])
def test_fp32_parameters_are_their_own_master(stage, expected):
    assert formula(STAGES[stage], 1.0, 4, parameter_bytes=4).total == expected
    assert formula(STAGES[stage], 1.0, 4, parameter_bytes=4).master == 0


@pytest.mark.parametrize(
    ("stage", "num_micro_batches", "times_psi"),
    [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 5, 2), (1, 5, 2), (2, 5, 6), (3, 5, 15)],
)
def test_traffic_is_two_or_three_times_the_parameters(stage, num_micro_batches, times_psi):
    for num_ranks, sent in ((4, times_psi * 1000 * 3 / 4), (1, 0)):
        sizes = axis_sizes(STAGES[stage], num_ranks)
        assert sum(axis_bytes(STAGES[stage], 1000.0, sizes, num_micro_batches)) == sent


@pytest.mark.parametrize(
    ("stage", "offloaded", "accelerator", "host"),
    [
        (0, (), (200, 200, 400, 800), (0, 0, 0, 0)),
        (0, ("optimizer",), (200, 200, 0, 0), (0, 200, 400, 800)),  # full gradients stay, and are copied
        (1, ("optimizer",), (200, 200, 0, 0), (0, 50, 100, 200)),
        (2, ("optimizer", "parameters"), (200, 0, 0, 0), (0, 50, 100, 200)),  # parameters that persist stay
        (3, ("optimizer",), (50, 0, 0, 0), (0, 50, 100, 200)),
        (3, ("parameters",), (0, 50, 100, 200), (50, 0, 0, 0)),
        (3, ("optimizer", "parameters"), (0, 0, 0, 0), (50, 50, 100, 200)),
    ],
)
def test_states_in_host_memory(stage, offloaded, accelerator, host):
    """One hundred parameters on four ranks, in the order parameters, gradients, master weights, moments."""
    policy = STAGES[stage]
    found = placed(formula(policy, 100, 4), policy, 4, offloaded)
    assert found == (ModelStates(*accelerator), ModelStates(*host))


def test_parameters_that_persist_or_are_kept_are_gathered_less_often():
    """Two all-gathers of 800 bytes without the 100 that are kept, in each micro-batch, and one of 200 that persist."""
    assert axis_bytes(STAGES[3], 1000.0, (4, 1)) == (3000 * 3 / 4, 0)
    found = axis_bytes(STAGES[3], 1000.0, (4, 2), 3, resident_bytes=200.0, kept_bytes=100.0)
    inside, between = (3 * 1000 + 3 * (2 * 800 - 100) + 200) * 3 / 4, 2 * 1000 / 4 / 2  # once a step between groups
    assert found == (inside, between)
    over_all = replace(STAGES[3], optimizer=Division.ALL)
    assert axis_bytes(over_all, 1000.0, (4, 2), 3, gradient_bytes=(4000.0, 2000.0))[1] == (2000 + 1000) / 4 / 2
    assert [axis_sizes(STAGES[stage], 8, 4) for stage in (0, 3)] == [(1, 8), (4, 2)], "stage 0 divides nothing"
