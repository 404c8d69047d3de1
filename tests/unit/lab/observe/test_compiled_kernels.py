"""The kernels of compiled code, compared with what can be fused, and their places in a log."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.observe.compiled_kernels import CompiledCalls, CompiledRegion, compiled_region, splice
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.kernel_log import Kernel, KernelLog
from lab.observe.operation_observer import observe_operations
from zero.updates.compiled import compiled_on_gpus

TOKENS, WIDTH = 8192, 256
PASS = TOKENS * WIDTH * 4  # bytes


def named(*names: str, phase: str = "forward") -> list[Kernel]:
    return [Kernel(name, phase, 1, torch.float32) for name in names]


REGION = CompiledRegion(
    {"forward": named("a", "b"), "backward": named("x", "y", "z")}, {"forward": named("AB"), "backward": named("XYZ")}
)


@pytest.mark.parametrize(
    ("log", "spliced", "places"),
    [
        ("a b", "AB", [0, 1, 1]),
        ("q a b a b q", "q AB AB q", [0, 1, 2, 2, 3, 3, 4]),
        ("x reduce y z add", "XYZ reduce add", [0, 1, 2, 2, 2, 3]),
        ("a q", "a q", [0, 1, 2]),
        ("a a b", "AB a", [0, 1, 2, 2]),
        ("", "", [0]),
    ],
)
def test_calls_are_replaced_and_what_runs_inside_one_comes_after_it(log: str, spliced: str, places: list[int]):
    found, found_places = splice(named(*log.split(), phase="backward"), [REGION])
    assert found == named(*spliced.split(), phase="backward")
    assert found_places == places


class Chain(nn.Module):
    """Operations of which eager torch runs each by itself, and a compiler all at once, around a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x + F.gelu(F.linear((x * factor).sin() + 1, self.weight))


def build() -> tuple[nn.Module, Sequence[Any]]:
    return Chain(), (torch.empty(TOKENS, WIDTH, requires_grad=True), 2.0)


def test_compiled_kernels_read_and_write_once_what_is_fused():
    region = compiled_region(build)
    assert region is not None
    for phase, eager in region.eager.items():
        products, compiled_products = (
            [k.product for k in kernels if k.product] for kernels in (eager, region.compiled[phase])
        )
        assert products == compiled_products != []
    assert [k.name for k in region.compiled["forward"]] == ["compiled sin", "mm", "compiled erf"]
    assert [k.name for k in region.compiled["backward"]] == ["compiled erf+exp", "mm", "mm", "compiled cos"]
    eager, compiled = (
        [k.num_bytes for k in kernels["forward"] if not k.product] for kernels in (region.eager, region.compiled)
    )
    assert eager == [2 * PASS, 2 * PASS, 2 * PASS, 2 * PASS, 3 * PASS], "mul, sin, add; gelu, add"
    assert compiled == [2 * PASS, 3 * PASS]
    # Of gelu: its input and the gradient are read, and one is written. Of the rest: the gradients of the product's
    # result and of x + ... and x itself are read, and one gradient is written.
    assert [k.num_bytes for k in region.compiled["backward"] if not k.product] == [3 * PASS, 4 * PASS]


def test_a_function_may_return_several_tensors():
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    region = compiled_region(lambda: (two, [torch.empty(TOKENS, WIDTH, requires_grad=True)]))
    assert region is not None
    (forward,), (backward,) = region.compiled["forward"], region.compiled["backward"]
    assert (forward.num_bytes, backward.num_bytes) == (3 * PASS, 4 * PASS)
    assert [len(region.eager[phase]) for phase in ("forward", "backward")] == [2, 6]


def log_sums_to_probabilities_(logits: Tensor) -> Tensor:
    sums = logits.float().logsumexp(-1)
    logits.copy_((logits - sums[:, None]).exp())
    return sums


def by_halves(logits: Tensor) -> Tensor:
    return torch.cat([log_sums_to_probabilities_(part) for part in logits.chunk(2)])


def build_softmax(function: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    return function, [torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)]


def test_a_function_that_writes_to_its_argument_is_one_kernel_without_a_backward():
    region = compiled_region(partial(build_softmax, log_sums_to_probabilities_), partial(build_softmax, by_halves))
    assert region is not None
    assert region.eager.keys() == region.compiled.keys() == {"forward"}
    assert len(region.eager["forward"]) > 10
    (kernel,) = region.compiled["forward"]
    assert kernel.num_bytes == PASS + 4 * TOKENS, (
        "logits are read and written, in half of fp32's bytes, and sums written"
    )


def test_without_the_private_parts_of_torch_kernels_stay_eager(monkeypatch, caplog):
    def changed(*_arguments: Any, **_options: Any) -> None:
        raise AttributeError("GraphLowering has no attribute _update_scheduler\nand a long explanation")

    monkeypatch.setattr("lab.observe.inductor_internals.plan", changed)
    assert compiled_region(build) is None
    (record,) = (record for record in caplog.records if record.name == "lab.observe.compiled_kernels")
    assert "cannot be counted, so eager ones are" in record.message
    assert "\n" not in record.message


@compiled_on_gpus
def decay_and_add_(x: Tensor, update: Tensor, rate: float, *, factor: float) -> None:
    x.mul_(factor).add_(update, alpha=rate)


def test_a_dry_run_counts_compiled_functions_by_their_elements_and_on_the_host_as_they_are():
    host: list[Tensor] = []
    log = KernelLog(lambda: "update", is_on_host=lambda _tensor: False)
    calls = CompiledCalls(is_on_host=lambda tensor: any(tensor is one for one in host))
    with QuickFakeTensorMode(), observe_operations(calls), observe_operations(log):
        small, large = ([torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)] for numel in (1000, 3000))
        log.kernels.clear()
        decay_and_add_(small[1], small[0], 0.5, factor=0.9)
        assert not log.kernels, "before the recorded step"
        calls.log = log
        for update, x in (small, large):
            decay_and_add_(x, update, 0.5, factor=0.9)
        assert [(kernel.phase, kernel.num_bytes) for kernel in log.kernels] == [("update", 10_000), ("update", 30_000)]
        host.append(small[1])
        log.kernels.clear()
        decay_and_add_(small[1], small[0], 0.5, factor=0.9)
        assert [kernel.name for kernel in log.kernels] == ["mul_", "add_"]
