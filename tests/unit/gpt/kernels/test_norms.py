"""The RMSNorm of a GPT, compared with torch's."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gpt.kernels.norms import RMSNorm
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.operation_observer import observe_operations


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-7)])
def test_an_rms_norm_and_its_gradients_are_those_of_torch(dtype, tolerance):
    """bf16 has 8 bits: the results are rounded once, of sums in fp32."""
    torch.manual_seed(1)
    norm = RMSNorm(6, eps=0.1)
    norm.weight.data = torch.randn(6, dtype=dtype)
    x, grad = torch.randn(2, 3, 6, dtype=dtype).requires_grad_(), torch.randn(2, 3, 6, dtype=dtype)
    found = norm(x)
    expected = F.rms_norm(x.double(), (6,), norm.weight.double(), 0.1)
    gradients = torch.autograd.grad(found, (x, norm.weight), grad)
    torch_gradients = torch.autograd.grad(expected, (x, norm.weight), grad.double())
    for one, other in zip((found, *gradients), (expected, *torch_gradients), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_fake_results_have_the_shapes_and_types_of_real_ones():
    shapes = []
    for is_fake in (False, True):
        with QuickFakeTensorMode() if is_fake else torch.enable_grad():
            x, weight = torch.ones(2, 3, 6, dtype=torch.bfloat16), torch.ones(6)
            results = torch.ops.zero.rms_norm(x, weight, 0.1)
            results += torch.ops.zero.rms_norm_gradients(x, x, weight, results[1])
        shapes.append([(result.shape, result.dtype) for result in results])
    assert shapes[0] == shapes[1]


class Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_operation(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.names.append(str(function))


def test_on_a_gpu_and_in_compiled_code_it_is_torchs_own_and_elsewhere_one_operation():
    norm, graphs = RMSNorm(6, eps=0.1), []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(norm, backend=keep)(torch.ones(2, 6))
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.rms_norm]
    for device, expected in (("cpu", True), ("cuda", False)):
        with QuickFakeTensorMode(), observe_operations(seen := Names()), torch.no_grad():
            norm.weight = torch.nn.Parameter(torch.ones(6, device=device))
            norm(torch.ones(2, 6, device=device))
        assert ("zero.rms_norm.default" in seen.names) == expected
