"""Measurements of the preflight come back from the cluster file that it writes."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel.errors import ConfigError
from parallel.launch import device_kernels, reference_step
from parallel.launch.cluster import RESERVED_BYTES, ClusterSpec
from parallel.launch.curves import Curve, mean_curves
from parallel.launch.device_kernels import KERNELS, MeasuredAttention, MeasuredProduct
from parallel.launch.kernel_costs import kernel_seconds
from parallel.launch.measured_cluster import attention_fraction, reserved_bytes, with_step_factors, write_cluster
from parallel.launch.products import TileModel, attention_flops, fit_overhead, peak_rate
from parallel.launch.reference_step import Shape

CLUSTER = ClusterSpec.load(Path(__file__).resolve().parents[4] / "configs/clusters/dgx-a100.yaml")
CURVE = Curve("add float32", (10.0, 100.0), (1.0, 2.0))


def test_a_written_cluster_is_loaded_with_its_curves(tmp_path):
    spec = dataclasses.replace(CLUSTER, kernels=(CURVE,), collectives=(CURVE,), device="cpu")
    write_cluster(spec, tmp_path / "cluster.yaml", ["n1"])
    assert ClusterSpec.load(tmp_path / "cluster.yaml") == spec
    assert ClusterSpec(**dataclasses.asdict(spec)) == spec


@pytest.mark.parametrize(
    ("curve", "problem"),
    [
        (3, "an element of kernels is no measured curve; give it name, num_bytes, seconds"),
        ({"name": "add"}, "an element of kernels is no measured curve"),
        ({"name": "add", "num_bytes": [1, 2], "seconds": [1]}, "has 2 num_bytes and 1 seconds"),
        ({"name": "add", "num_bytes": [2, 1], "seconds": [1, 1]}, "the smallest size first"),
        ({"name": "add", "num_bytes": [], "seconds": []}, "at least one"),
        ({"name": "add", "num_bytes": [1], "seconds": [0]}, "above 0"),
    ],
)
def test_a_curve_that_is_none_is_refused(curve, problem):
    with pytest.raises(ConfigError, match=problem):
        dataclasses.replace(CLUSTER, kernels=[curve])


def test_the_curves_of_ranks_are_averaged():
    other = dataclasses.replace(CURVE, seconds=(3.0, 6.0))
    assert mean_curves([[CURVE], [other]]) == (dataclasses.replace(CURVE, seconds=(2.0, 4.0)),)


def test_the_overhead_and_the_peak_of_products_are_found_in_their_times():
    true = TileModel(128, 108, 128.0, splits=True)
    shapes = [(1, 2048, 2048, 1024), (1, 4096, 1024, 8192), (1, 256, 256, 16384), (1, 1000, 3000, 500)]
    measured = [((b, m, n, k), 2 * b * m * n * k / (3e14 * true.share_of_peak((b, m, n, k)))) for b, m, n, k in shapes]
    found = fit_overhead(dataclasses.replace(true, overhead=0.0), measured)
    assert found == true
    assert peak_rate(found, measured) == pytest.approx(3e14)


def test_the_rate_of_attention_is_found_in_its_time():
    shape = (16, 1024, 1024, 64, 2)
    seconds = attention_flops(shape, CLUSTER.attention_overhead) / (0.3 * 312e12)
    kernels = mock.Mock(attentions=[MeasuredAttention("bfloat16", shape, seconds)])
    assert attention_fraction([kernels], "bfloat16", CLUSTER) == pytest.approx(0.3)
    assert attention_fraction([kernels], "float32", CLUSTER) is None


def test_what_cuda_takes_of_a_device_is_what_torch_and_the_free_memory_leave():
    figures = {"synchronize": mock.Mock(), "mem_get_info": lambda _: (30, 100), "memory_reserved": lambda _: 50}
    with mock.patch.multiple(torch.cuda, **figures):
        assert reserved_bytes(torch.device("cuda")) == 20
    assert reserved_bytes(torch.device("cpu")) == RESERVED_BYTES


def test_measured_kernels_are_those_that_a_step_runs():
    cpu = torch.device("cpu")
    small = {"NUMELS": {"cpu": (2**10,)}, "BUDGET_SECONDS": 0.0, "LAYERS": {"cpu": ((8, 16, 32),)}}
    with mock.patch.multiple(device_kernels, ATTENTIONS={"cpu": ((2, 8, 8),)}, **small):
        names = {curve.name for curve in device_kernels.measure_kernels(cpu)}
        products = device_kernels.measure_products(cpu)
        attentions = device_kernels.measure_attention(cpu)
    assert len(names) == 2 * len(KERNELS), "each kernel has its own curve in both types"
    assert {"gelu_backward float32", "native_layer_norm_backward bfloat16", "fused_adamw float32"} <= names
    assert {"embedding_dense_backward float32", "to_copy float32", "foreach_norm float32"} <= names
    assert [p.product for p in products if p.dtype == "float32"] == [(1, 8, 32, 16), (1, 8, 16, 32), (1, 32, 16, 8)]
    assert all(isinstance(product, MeasuredProduct) and product.seconds > 0 for product in products)
    assert [a.attention for a in attentions] == [(2, 8, 8, 8, 2), (2, 8, 8, 8, 5)] * 2


def test_the_factor_of_a_step_makes_its_kernels_take_as_long_as_it_was_measured():
    cpu, small = torch.device("cpu"), {"cpu": Shape(1, 16, 2, 8, 2, 32)}
    spec = dataclasses.replace(CLUSTER, device="cpu", launch_seconds=1e-6)
    measured = [mock.Mock(step_seconds={"bfloat16": seconds, "float32": 3.0}) for seconds in (4.0, 6.0)]
    with mock.patch.multiple(reference_step, SHAPES=small, BUDGET_SECONDS=0.0):
        found = with_step_factors(spec, measured, cpu)
        for dtype, seconds in ((torch.bfloat16, 5.0), (torch.float32, 3.0)):
            kernels = reference_step.reference_kernels(cpu, dtype)
            assert sum(kernel_seconds(kernel, found) for kernel in kernels) == pytest.approx(seconds)
            assert sum(kernel.product is not None for kernel in kernels) == 3 * 5, (
                "each linear layer has three products"
            )
        assert reference_step.measure_reference_step(cpu, torch.float32) > 0


def test_each_query_of_attention_reads_half_of_the_keys_and_of_the_overhead():
    heads, queries, keys, head_dim, num_products = 2, 8, 16, 64, 5
    flops = attention_flops((heads, queries, keys, head_dim, num_products), overhead=6.0)
    assert flops == num_products * heads * queries * (8 + 3) * 2 * head_dim
