"""The cost of the head and the loss for 8k tokens x 50k words x 1600: products, bytes beside them, and memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.shape.config import ModelConfig
from lab.dryrun.compiled_code import loss_region
from lab.observe.compiled_kernels import compiled_region
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.kernel_log import Kernel, KernelLog
from lab.observe.memory_tracker import MemoryTracker
from lab.observe.operation_observer import observe_operations
from parallel.mesh import Axis
from parallel.tensor.linear_cross_entropy import linear_cross_entropy
from parallel.tensor.softmax import CHUNK_TOKENS, Softmax, log_sums, to_gradients_
from parallel.tensor.token_layout import ReplicatedTokens

TOKENS, WORDS, PADDED, FEATURES = 8192, 50257, 50304, 1600
BEFORE = 1782e6  # bytes of the logits, their gradient, and copies of some rows in fp32, as the loss was before issue 17
ONE_DEVICE = ReplicatedTokens(Axis.trivial("tensor"))
CPU = torch.device("cpu")


def num_bytes(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.num_bytes for kernel in kernels)


@dataclass
class Cost:
    """The kernels of the loss, and the largest memory above its inputs."""

    kernels: list[Kernel] = field(default_factory=list)
    peak: int = 0

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes_beside_products(self) -> int:
        return num_bytes(kernel for kernel in self.kernels if not kernel.product)


def cost(needs_x: bool = True, needs_weight: bool = True) -> Cost:
    """Return the cost in bf16 of forward, and of backward if a gradient is needed."""
    with QuickFakeTensorMode(), MemoryTracker(CPU) as tracker:
        x = torch.empty(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=needs_x)
        weight = torch.empty(PADDED, FEATURES, dtype=torch.bfloat16, requires_grad=needs_weight)
        targets, scale = torch.empty(TOKENS, dtype=torch.int64), torch.empty(())
        at_rest = tracker.device.total
        log = KernelLog(lambda: "", lambda _tensor: False)
        with observe_operations(log):
            loss = linear_cross_entropy(x, weight, targets, WORDS, ONE_DEVICE, loss_scale=scale)
            if loss.requires_grad:
                (loss * scale).backward()
        return Cost(log.kernels, tracker.device.peak_total - at_rest)


def test_compiled_it_moves_less_than_3_gb_beside_the_products():
    found, num_chunks = cost(), TOKENS // CHUNK_TOKENS
    model = ModelConfig(1, FEATURES, 1, 1, WORDS)
    region = loss_region(model, Softmax(), CHUNK_TOKENS, torch.bfloat16)
    eager, compiled = (num_chunks * num_bytes(kernels["forward"]) for kernels in (region.eager, region.compiled))
    assert compiled == pytest.approx(2 * TOKENS * WORDS * 2, rel=1e-3)  # each logit is read, and its gradient written
    cast = PADDED * FEATURES * (4 + 2) + 2 * TOKENS * FEATURES * 2  # the sums of the weight's gradient, and that of x
    assert found.bytes_beside_products - eager == pytest.approx(cast, rel=0.01)
    assert compiled + cast < 3e9
    assert found.peak < 0.4 * BEFORE


def test_ranks_that_share_the_words_read_the_logits_twice():
    def build(function: Callable[..., Any], num_factors: int) -> tuple[Callable[..., Any], list[Tensor]]:
        return function, [
            torch.empty(CHUNK_TOKENS, WORDS, dtype=torch.bfloat16),
            *torch.empty(num_factors, CHUNK_TOKENS),
        ]

    regions = (
        compiled_region(partial(build, *call))
        for call in ((partial(log_sums, Softmax()), 0), (partial(to_gradients_, Softmax()), 2))
    )
    found = sum(num_bytes(region.compiled["forward"]) for region in regions)
    assert found == pytest.approx(3 * CHUNK_TOKENS * WORDS * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("needs_x", "needs_weight", "num_products"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)],
)
def test_no_product_is_computed_twice_or_in_vain(needs_x, needs_weight, num_products):
    assert cost(needs_x, needs_weight).flops == num_products * 2 * TOKENS * PADDED * FEATURES


def test_without_grad_mode_only_the_loss_is_computed():
    with torch.no_grad():
        found = cost()
    assert found.flops == 2 * TOKENS * PADDED * FEATURES
    assert found.peak < 0.25 * BEFORE


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"cap": 2.0}, {"z_loss": 0.3}, {"cap": 2.0, "z_loss": 0.3}], ids=str)
def test_compiled_it_equals_eager(options):
    """The functions are compiled for a CPU; the chunks have two sizes."""
    x, weight, targets = torch.randn(70, 16), torch.randn(128, 16), torch.randint(100, (70,))
    results = []
    for is_compiled in (False, True):
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_cross_entropy(
            own_x, own_weight, targets, 100, ONE_DEVICE, softmax=Softmax(is_compiled, chunk_tokens=32, **options)
        )
        loss.backward()
        with torch.no_grad():
            alone = linear_cross_entropy(x, weight, targets, 100, ONE_DEVICE, softmax=Softmax(is_compiled, **options))
        results.append((loss, alone, own_x.grad, own_weight.grad))
    for compiled, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)
