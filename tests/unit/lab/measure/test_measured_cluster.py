"""Measurements of the preflight come back from the cluster file that it writes."""

import dataclasses
from datetime import date
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lab.measure import device_kernels, reference_step
from lab.measure.cluster import RESERVED_BYTES, ClusterSpec
from lab.measure.curves import Curve, mean_curves
from lab.measure.device_kernels import KERNELS, DeviceKernels
from lab.measure.kernel_costs import kernel_seconds
from lab.measure.measured_cluster import reserved_bytes, write_cluster
from lab.measure.reference_step import Shape
from lab.observe.kernel_log import Kernel
from lab.observe.memory_tracker import MemoryTracker
from parallel.validation.errors import ConfigError

CLUSTER = ClusterSpec.load(Path(__file__).resolve().parents[4] / "configs/clusters/dgx-a100.yaml")
CURVE = Curve("add float32", (10.0, 100.0), (1.0, 2.0))


def test_a_written_cluster_says_where_it_was_measured_and_has_four_digits_of_each_rate(tmp_path):
    path = tmp_path / "new" / "folder" / "cluster.yaml"
    fine = Curve("add float32", (1234567.0, 2345678.0), (0.000123456, 2.0))
    for nodes in (["n9"], ["n1", "n2"]):
        write_cluster(dataclasses.replace(CLUSTER, kernels=(fine,), gpus_per_node=12345), path, nodes)
    head, name, *_ = path.read_text().splitlines()
    assert head.startswith(f"# Measured by lab.measure on {date.today()}, on n1, n2: ")
    assert name.startswith("name: ")
    found = ClusterSpec.load(path)
    assert found.kernels == (Curve("add float32", (1235000.0, 2346000.0), (0.0001235, 2.0)),)
    assert found.gpus_per_node == 12345


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


def test_what_cuda_takes_of_a_device_is_what_torch_and_the_free_memory_leave():
    figures = {"synchronize": mock.Mock(), "mem_get_info": lambda _: (30, 100), "memory_reserved": lambda _: 50}
    with mock.patch.multiple(torch.cuda, **figures):
        assert reserved_bytes(torch.device("cuda")) == 20
    assert reserved_bytes(torch.device("cpu")) == RESERVED_BYTES


def test_measured_kernels_are_those_that_a_step_runs():
    cpu = torch.device("cpu")
    small = {"NUMELS": {"cpu": (2**10,)}, "BUDGET_SECONDS": 0.0, "LAYERS": {"cpu": ((8, 16, 32),)}}
    with mock.patch.multiple(device_kernels, ATTENTIONS={"cpu": ((2, 8, 8),)}, **small), MemoryTracker(cpu) as tracker:
        measured = device_kernels.measure_kernels(cpu)
    assert tracker.device.peak_total < 64 * 2**12, "the inputs of one kernel at a time, eight of 4 KiB for each"
    names = {curve.name for curve in DeviceKernels(measured, 0.0, {}).curves}
    kernels = [one.kernel for one in measured]
    assert len(names) == 2 * len(KERNELS), "each kernel has its own curve in both types"
    assert {"gelu_backward float32", "native_layer_norm_backward bfloat16", "fused_adamw float32"} <= names
    assert {"embedding_dense_backward float32", "to_copy float32", "foreach_norm float32"} <= names
    assert [k.product for k in kernels if k.product] == [(1, 8, 32, 16), (1, 8, 16, 32), (1, 32, 16, 8)] * 2
    assert [k.attention for k in kernels if k.attention] == [(2, 8, 8, 8, 2), (2, 8, 8, 8, 5)] * 2
    assert all(one.seconds > 0 for one in measured)


def test_a_block_of_the_reference_step_is_a_layer_of_torchs_causal_transformer():
    torch.manual_seed(0)
    block = reference_step.Block(Shape(1, 16, 2, 8, 2, 32))
    tanh_gelu = partial(F.gelu, approximate="tanh")
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, tanh_gelu, batch_first=True, norm_first=True)
    parts = {"norms.0": "norm1", "qkv": "self_attn.in_proj_", "projection": "self_attn.out_proj"}
    parts |= {"norms.1": "norm2", "up": "linear1", "down": "linear2"}
    of_block = block.state_dict()
    layer.load_state_dict(
        {
            f"{theirs}{kind}" if theirs.endswith("_") else f"{theirs}.{kind}": of_block[f"{own}.{kind}"]
            for own, theirs in parts.items()
            for kind in ("weight", "bias")
        }
    )
    x = torch.randn(2, 8, 16)
    expected = layer(x, nn.Transformer.generate_square_subsequent_mask(8), is_causal=True)
    torch.testing.assert_close(block(x), expected)  # fp32


def test_the_measured_attention_is_causal(monkeypatch):
    attended = mock.Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attended)
    no_others = {"KERNELS": (), "LAYERS": {"cpu": ()}, "ATTENTIONS": {"cpu": ((2, 8, 8),)}, "BUDGET_SECONDS": 0.0}
    with mock.patch.multiple(device_kernels, **no_others):
        device_kernels.measure_kernels(torch.device("cpu"))
    assert {call.kwargs["is_causal"] for call in attended.call_args_list} == {True}


def test_products_and_attention_are_not_taken_for_additions():
    spec = dataclasses.replace(CLUSTER, kernels=(Curve("add float32", (1.0,), (1e3,)),), attention_fraction=0.5)
    shapes = {"product": (1, 8, 8, 8)}, {"attention": (1, 8, 8, 64, 2)}
    for shape in shapes:
        kernel = Kernel("mm", "forward", 10, torch.float32, **shape)
        assert kernel_seconds(kernel, spec) == kernel_seconds(kernel, dataclasses.replace(spec, kernels=()))
    assert kernel_seconds(Kernel("relu", "forward", 1, torch.float32), spec) == 1e3


@pytest.mark.parametrize(("product", "factor"), [((3, 128, 64, 64), 1), ((1, 127, 64, 64), 4), ((1, 128, 64, 63), 4)])
def test_a_product_with_a_size_that_is_no_multiple_of_eight_has_no_tensor_cores(product, factor):
    kernel = Kernel("bmm", "forward", 0, torch.bfloat16, product=product)
    spec = dataclasses.replace(CLUSTER, kernel_seconds=1e-12, launch_seconds=0.0)
    with_cores = kernel_seconds(kernel, dataclasses.replace(spec, device="cpu"))  # which has no such rule
    assert kernel_seconds(kernel, spec) == pytest.approx(factor * with_cores)
