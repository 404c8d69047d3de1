"""The physical effects of a projection, each compared with a time that is computed by hand."""

import dataclasses
from statistics import NormalDist

import pytest
import torch

from lab.dryrun.costs.collectives import MeshShape, collective_seconds
from lab.dryrun.costs.program import Program, as_program
from lab.dryrun.projection import project
from lab.measure.cluster import ClusterSpec
from lab.measure.curves import Curve
from lab.measure.kernel_costs import kernel_seconds
from lab.observe.kernel_log import Kernel
from parallel.comm_log import CommEvent

PLAIN = ClusterSpec(
    name="plain",
    gpus_per_node=8,
    gpu_memory_gib=80,
    host_memory_gb=1000,
    peak_half_tflops=100,
    num_multiprocessors=100,
    memory_gb_per_second=1000,
    intra_node_gb_per_second=100,
    node_gb_per_second=80,
    network_card_gb_per_second=10,
    host_gb_per_second=10,
    kernel_seconds=1e-9,
    hop_seconds=1e-9,
)
ONE, TWO_NODES = MeshShape(1, 1), MeshShape(16, 1)


def with_effect(**figures) -> ClusterSpec:
    return dataclasses.replace(PLAIN, **figures)


def product(m: int, n: int, k: int) -> Kernel:
    return Kernel("mm", "forward", 0, torch.bfloat16, product=(1, m, n, k))


def attention(seq: int, head_dim: int = 128, num_products: int = 2) -> Kernel:
    sizes = (10, seq, seq, head_dim, num_products)
    return Kernel("_scaled_dot_product_flash_attention", "forward", 0, torch.bfloat16, attention=sizes)


def event(op: str, axis: str, size: int, num_bytes: int, launched: int = 0, awaited: int = 0) -> CommEvent:
    return CommEvent(op, axis, size, num_bytes, torch.bfloat16, "backward", launched, awaited, awaited)


def memory_bound(milliseconds: float, name: str = "add", phase: str = "forward") -> Kernel:
    return Kernel(name, phase, int(milliseconds * 1e9), torch.bfloat16)


def test_fused_attention_computes_half_of_the_scores_at_its_share_of_the_peak():
    assert kernel_seconds(attention(2048), PLAIN) == PLAIN.kernel_seconds, "its bytes alone count by default"
    cluster = with_effect(attention_fraction=0.3)
    flops = 2 * 2 * 10 * 2048 * (2048 + 350) / 2 * 128
    assert kernel_seconds(attention(2048), cluster) == pytest.approx(flops / 30e12)
    assert kernel_seconds(attention(2048, num_products=5), cluster) == pytest.approx(2.5 * flops / 30e12)
    assert kernel_seconds(attention(2048, 100), cluster) == kernel_seconds(attention(2048), cluster), "heads are padded"
    rates = [flops / kernel_seconds(attention(seq), cluster) for seq, flops in [(512, 512**2), (16384, 16384**2)]]
    assert rates[0] / rates[1] == pytest.approx(191 / 335, rel=0.07), "FlashAttention-3, figure 5"


def test_a_tile_takes_as_long_as_its_k_and_its_pipeline():
    tiles = product(1280, 1280, 1024)  # one round of a hundred tiles
    plain = kernel_seconds(tiles, PLAIN)
    assert kernel_seconds(tiles, with_effect(tile_overhead=128)) == pytest.approx(plain * (1024 + 128) / 1024)


def test_a_long_product_with_few_tiles_is_divided_along_k():
    few = product(128, 128 * 40, 2**16)  # forty tiles on a hundred multiprocessors
    plain, divided = kernel_seconds(few, PLAIN), kernel_seconds(few, with_effect(splits_products=True))
    assert divided == pytest.approx(plain * 2 / 5)  # two hundred parts, of a fifth of k each, in two rounds
    short = dataclasses.replace(few, product=(1, 128, 128 * 40, 64))
    figures = {"tile_overhead": 1e4}
    divided = kernel_seconds(short, with_effect(splits_products=True, **figures))
    assert divided == pytest.approx(kernel_seconds(short, with_effect(**figures)), rel=0.01), (
        "parts have pipelines, too"
    )


def test_the_latency_of_a_collective_is_that_of_nccls_fastest_algorithm():
    nccl = with_effect(latency="nccl", rings_use_all_cards=True)
    inside = collective_seconds(event("all_gather", "data", 8, 8), nccl, MeshShape(8, 1))
    assert inside == pytest.approx(10e-6 + 7 * 1.9e-6, rel=1e-3)
    across = collective_seconds(event("reduce_scatter", "data", 16, 8), nccl, TWO_NODES)
    assert across == pytest.approx(10e-6 + 14 * 1.9e-6 + 1 * 4.0e-6, rel=1e-3)
    trees = collective_seconds(event("all_reduce", "data", 1024, 8), nccl, MeshShape(1024, 1))
    assert trees == pytest.approx(4.4e-6 + 2 * (7 * 1.2e-6 + 7 * 8.5e-6), rel=1e-3)
    large = event("all_gather", "data", 8, 10**11)
    assert collective_seconds(large, nccl, MeshShape(8, 1)) == pytest.approx(large.wire_bytes / 100e9, rel=1e-3)
    assert collective_seconds(event("all_reduce", "data", 1, 100), nccl, ONE) == 0.0


def test_a_ring_uses_one_card_or_one_for_each_gpu():
    found = event("all_gather", "data", 16, 10**10)
    one, all_cards = (collective_seconds(found, with_effect(rings_use_all_cards=u), TWO_NODES) for u in (False, True))
    assert one == pytest.approx(found.wire_bytes / 10e9, rel=1e-3)
    assert all_cards == pytest.approx(found.wire_bytes / 80e9, rel=1e-3)
    fast = with_effect(rings_use_all_cards=True, node_gb_per_second=800)
    assert collective_seconds(found, fast, TWO_NODES) == pytest.approx(found.wire_bytes / 100e9, rel=1e-3)


@pytest.mark.parametrize("beside", [0.1, 2.0])
def test_a_gather_in_a_group_waits_for_the_one_between_groups_and_the_computation_does_not(beside: float):
    kernels = [memory_bound(1.0), memory_bound(beside), memory_bound(1.0)]
    between = event("all_gather", "replica", 2, 2 * 10**7, launched=1, awaited=1)  # 1 ms over one card
    inside = event("all_gather", "shard", 8, int(0.1e9 * 8 / 7), launched=1, awaited=2)  # 1 ms
    shape = MeshShape(16, 1, shard_size=8)
    assert project(kernels, [between, inside], PLAIN, shape).seconds == pytest.approx(4e-3, rel=1e-3)


def test_an_exchange_between_nodes_sends_what_each_rank_has_for_the_others():
    found = event("all_to_all", "data", 16, 10**10)
    outside = 8 * 8 / 15 * found.wire_bytes
    assert collective_seconds(found, PLAIN, TWO_NODES) == pytest.approx(outside / 80e9, rel=1e-3)


def test_a_kernel_is_slower_while_a_collective_runs_beside_it():
    one_ms = event("all_gather", "data", 8, int(0.1e9 * 8 / 7), launched=0, awaited=2)
    kernels = [memory_bound(0.4), memory_bound(2.0)]
    cluster = with_effect(collective_multiprocessors=20)
    # In the first millisecond 0.8 ms of work are done, then 1.6 ms at full speed.
    assert project(kernels, [one_ms], cluster, MeshShape(8, 1)).seconds == pytest.approx(2.6e-3, rel=1e-3)
    assert project(kernels, [one_ms], PLAIN, MeshShape(8, 1)).seconds == pytest.approx(2.4e-3, rel=1e-3)


def test_a_step_waits_for_the_slowest_gpu():
    cluster = with_effect(speed_spread=0.02)
    assert cluster.slowest_of(1) == 1.0
    assert cluster.slowest_of(512) == pytest.approx(1 + 0.02 * NormalDist().inv_cdf(0.9988), rel=1e-3)
    assert project([memory_bound(1.0)], [], cluster, MeshShape(512, 1)).seconds == pytest.approx(1.0607e-3, rel=1e-3)


def test_kernels_start_after_the_host_has_launched_them():
    short = [memory_bound(0.001)] * 100
    assert project(short, [], with_effect(launch_seconds=5e-6), ONE).seconds == pytest.approx(501e-6, rel=1e-3)
    long = [memory_bound(0.01)] * 100
    assert project(long, [], with_effect(launch_seconds=5e-6), ONE).seconds == pytest.approx(1005e-6, rel=1e-3)


def test_a_micro_batch_lasts_from_its_forward_to_the_next():
    kernels = [memory_bound(1.0, phase=phase) for phase in ("forward", "backward", "backward", "forward", "backward")]
    assert project(kernels, [], PLAIN, ONE).micro_batch_seconds == pytest.approx(3e-3)
    assert project(kernels[:3], [], PLAIN, ONE).micro_batch_seconds == 0.0


def test_merged_kernels_are_the_one_that_moves_the_most_and_a_collective_ends_their_run():
    kernels = [memory_bound(1.0), memory_bound(3.0, "gelu"), product(1, 1, 1), memory_bound(1.0), memory_bound(2.0)]
    found, events = as_program(kernels, [event("all_gather", "data", 8, 8, 4, 5)], Program(merges_elementwise=True))
    assert [kernel.num_bytes for kernel in found] == [3e9, 0, 1e9, 2e9]
    assert (events[0].launched, events[0].awaited) == (3, 4)
    found, events = as_program(kernels, [event("all_gather", "data", 8, 8, 2, 3)], Program(merges_elementwise=True))
    assert [kernel.num_bytes for kernel in found] == [3e9, 0, 2e9]
    assert (events[0].launched, events[0].awaited) == (1, 2)


def test_measured_kernels_and_collectives_take_their_measured_times():
    curves = (Curve("add float32", (1e6, 4e6), (1e-3, 2e-3)), Curve("gelu bfloat16", (1e6,), (7e-3,)))
    cluster = with_effect(kernels=curves, collectives=(Curve("all_gather of 2", (1e3, 1e6), (1e-4, 1e-2)),))

    def add(num_bytes: float, name: str = "add_", dtype: torch.dtype = torch.float32) -> float:
        return kernel_seconds(Kernel(name, "forward", int(num_bytes), dtype), cluster)

    assert add(2e6) == pytest.approx(1e-3 * 2**0.5), "between two sizes, on a logarithmic scale"
    assert (add(10), add(8e6)) == pytest.approx((1e-3, 4e-3)), "below and above all of them"
    assert add(1e6, "gelu", torch.bfloat16) == 7e-3
    assert add(1e6, "tanh", torch.bfloat16) == pytest.approx(1e-3), "a kernel that was not measured is like an addition"
    two = event("all_gather", "data", 2, 2 * 10**6)
    assert collective_seconds(two, cluster, MeshShape(2, 1)) == pytest.approx(1e-2)
    assert collective_seconds(two, cluster, MeshShape(16, 8)) == pytest.approx(1e6 / 10e9, rel=1e-3), "between nodes"
    four = event("all_gather", "data", 4, 4 * 10**6)
    assert collective_seconds(four, cluster, MeshShape(4, 1)) == pytest.approx(3e6 / 100e9, rel=1e-3), (
        "of another group"
    )


def test_on_a_cpu_nothing_runs_side_by_side_and_each_kernel_is_launched_by_its_core():
    kernels = [memory_bound(1.0), dataclasses.replace(memory_bound(2.0), is_on_host=True), memory_bound(1.0)]
    one_ms = event("all_gather", "data", 8, int(0.1e9 * 8 / 7), launched=0, awaited=3)
    gpu = with_effect(launch_seconds=1e-5, host_memory_gb_per_second=8000)
    assert project(kernels, [one_ms], gpu, MeshShape(8, 1)).seconds == pytest.approx(3e-3, rel=0.01)
    cpu = dataclasses.replace(gpu, device="cpu")
    assert project(kernels, [one_ms], cpu, MeshShape(8, 1)).seconds == pytest.approx(5e-3 + 3e-5, rel=1e-3)


def test_a_program_may_gather_late_or_divide_products_beside_their_collective():
    kernels = [memory_bound(1.0), product(1, 1, 1), memory_bound(1.0)]
    reduction, gather = event("reduce_scatter", "data", 8, 8, 2, 3), event("all_gather", "data", 8, 8, 0, 2)
    _, events = as_program(kernels, [gather, reduction], Program(gathers_ahead_in_backward=False))
    assert [(e.op, e.launched) for e in events] == [("all_gather", 2), ("reduce_scatter", 2)]
    _, events = as_program(kernels, [event("all_reduce", "tensor", 8, 8, 0, 0), gather], Program(overlaps_tensor=True))
    assert [e.awaited for e in events] == [2, 2]
