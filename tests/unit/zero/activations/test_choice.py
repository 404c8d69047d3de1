"""The arithmetic of the paper's section 8: its volumes, and the choices that the paper itself made."""

import pytest

from zero.activations.choice import (
    Hardware,
    Workload,
    arithmetic_intensity,
    bytes_on_device,
    choose_store,
    exposed_seconds,
    largest_batch,
    pays,
)
from zero.core.partition.stage import STAGES
from zero.formulas.memory import formula
from zero.formulas.traffic import axis_bytes, axis_sizes

V100_BYTES = 32480 * 2**20


def workload(billions: float, L: int, b: int, stage: int, N_d: int, **changes: int) -> Workload:
    """Return a row of the paper's Figure 8: hidden 8192, sequence 1024, 16 tensor ranks, fp16."""
    psi = billions * 1e9 / 16
    states = formula(STAGES[stage], psi, N_d).total
    sent = sum(axis_bytes(STAGES[stage], 2 * psi, axis_sizes(STAGES[stage], N_d)))
    shape = {"s": 1024, "h": 8192, "k": 2, "N_m": 16, "tensor_size": 16, "vocab_size": 50304, "itemsize": 2}
    shape |= {"block_weights": 12 * 8192**2, "block_width": 12 * 8192}
    return Workload(b=b, L=L, state_bytes=states, data_bytes=sent, **(shape | changes))


def test_arithmetic_intensity_is_section_6s():
    """It is above 10K operations a byte for large models, and linear in their width and in a checkpoint's layers."""
    assert arithmetic_intensity(8192, 1, 2) == 48 * 8192 > 10_000
    assert arithmetic_intensity(100, 2, 4, block_weights=1000) == 40
    assert arithmetic_intensity(8192, 1, 2) == 4 * arithmetic_intensity(2048, 1, 2)
    assert arithmetic_intensity(8192, 3, 2) == 3 * arithmetic_intensity(8192, 1, 2)
    assert arithmetic_intensity(8, 3, 2, block_weights=12 * 64) == arithmetic_intensity(8, 3, 2)


@pytest.mark.parametrize(
    ("billions", "L", "b", "stage", "N_d", "store"),
    [
        (60, 75, 2, 1, 8, "keep"),  # C1
        (60, 75, 8, 2, 8, "keep"),  # C3
        (60, 75, 32, 2, 8, "partition"),  # C4, faster than C5 with the same batch
        (170, 212, 12, 2, 25, "partition_host"),  # C5; C1 to C4 ran out of memory
    ],
)
def test_the_choices_of_figure_8(billions, L, b, stage, N_d, store):
    chosen, reason = choose_store(workload(billions, L, b, stage, N_d), V100_BYTES, Hardware())
    assert chosen == store
    assert f"the first that holds a micro-batch of {b}" in reason


def test_partitioning_pays_if_the_data_axis_is_slow_and_not_if_it_is_fast():
    """With a larger batch a sequence takes less traffic along the data axis, at the price of the gathers."""
    w = workload(60, 75, 8, 2, 8)
    assert largest_batch(w, "partition", V100_BYTES) > 5 * largest_batch(w, "keep", V100_BYTES)
    assert pays(w, "partition", "keep", V100_BYTES, Hardware())
    assert not pays(w, "partition", "keep", V100_BYTES, Hardware(data_gb_per_second=1e6))
    assert "partition pays" in choose_store(w, V100_BYTES, Hardware())[1]
    assert "partition does not pay" in choose_store(w, V100_BYTES, Hardware(data_gb_per_second=1e6))[1]


def test_offload_is_hidden_from_an_arithmetic_intensity_on():
    """Two copies of a byte take as long as its operations at 2 x FLOPs a second / bytes a second."""
    w = workload(170, 212, 12, 2, 25)
    hidden = Hardware(host_gb_per_second=1.01 * 2 * 40e12 / arithmetic_intensity(8192, 2, 2) / 1e9)
    exposed = Hardware(host_gb_per_second=0.99 * 2 * 40e12 / arithmetic_intensity(8192, 2, 2) / 1e9)
    assert exposed_seconds(w, "partition_host", 12, hidden) == exposed_seconds(w, "partition", 12, hidden)
    assert exposed_seconds(w, "partition_host", 12, exposed) > exposed_seconds(w, "partition", 12, exposed)
    assert pays(w, "partition_host", "partition", V100_BYTES, Hardware())
    assert not pays(w, "partition_host", "partition", V100_BYTES, Hardware(host_gb_per_second=0.001))


def test_if_nothing_is_replicated_the_choice_is_between_keeping_and_the_host():
    alone = workload(1, 75, 400, 2, 8, N_m=1)
    assert choose_store(alone, V100_BYTES, Hardware())[0] == "partition_host"
    assert "partition " not in choose_store(alone, V100_BYTES, Hardware())[1]


def test_a_micro_batch_that_no_store_holds_is_reported():
    chosen, reason = choose_store(workload(1000, 212, 1, 2, 25), V100_BYTES, Hardware())
    assert chosen == "partition_host"
    assert "too small for a micro-batch of 1; sequences that fit: keep 0, partition 0, partition_host 0" in reason


@pytest.mark.parametrize(
    ("N_m", "stored", "seconds"),
    [
        (1, {"keep": 2000, "partition_host": 1000}, {"keep": 4, "partition_host": 4 + 8 - 4}),
        (
            2,
            {"keep": 4000, "partition": 2000 + 2000, "partition_host": 1000 + 2000},
            {"keep": 4, "partition": 4 + 2, "partition_host": 4 + 2 + 8 - 4},
        ),
        (
            4,
            {"keep": 8000, "partition": 2000 + 4000, "partition_host": 1000 + 4000},
            {"keep": 4, "partition": 4 + 4, "partition_host": 4 + 4 + 8 - 4},
        ),
    ],
)
def test_bytes_and_seconds_of_a_small_layout_are_those_computed_by_hand(N_m, stored, seconds):
    """Four checkpoints have 1000 elements of 2 bytes each, which are divided over `4 / N_m` of 4 tensor ranks.

    A byte is computed with in 80 operations, 2 nanoseconds. It is copied twice, in 2 nanoseconds each.
    """
    sizes = {"b": 2, "s": 10, "h": 100, "L": 8, "k": 2, "N_m": N_m, "tensor_size": 4, "vocab_size": 7, "itemsize": 2}
    w = Workload(**sizes, state_bytes=0, data_bytes=8000, block_weights=1000, block_width=1)
    hardware = Hardware(tflops=0.04, tensor_gb_per_second=2, data_gb_per_second=1, host_gb_per_second=0.5)
    for store, num_bytes in stored.items():
        assert bytes_on_device(w, store) == num_bytes
        assert 1e6 * exposed_seconds(w, store, 2, hardware) == pytest.approx(seconds[store])
