"""Gradients of the head and the loss on a GPU: compiled, with sums of the weight's gradient in fp32 in the product."""

import pytest
import torch

from parallel.mesh import Axis
from parallel.tensor.linear_cross_entropy import linear_cross_entropy
from parallel.tensor.softmax import Softmax, inductor_works
from parallel.tensor.token_layout import ReplicatedTokens

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
TOKENS, WORDS, FEATURES = 4096, 1024, 64


def gradients(dtype: torch.dtype, chunk_tokens: int, is_compiled: bool) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, weight = (torch.randn(n, FEATURES, generator=generator, device=DEVICE) for n in (TOKENS, WORDS))
    x, weight = x.bfloat16().to(dtype).requires_grad_(), weight.bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(WORDS - 5, (TOKENS,), generator=generator, device=DEVICE)
    tokens = ReplicatedTokens(Axis.trivial("tensor"))
    loss = linear_cross_entropy(
        x, weight, targets, WORDS - 5, tokens, softmax=Softmax(is_compiled, chunk_tokens=chunk_tokens)
    )
    (loss / 3).backward()
    return [x.grad, weight.grad]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("chunk_tokens", [TOKENS, 512])
def test_gradients_are_off_by_no_more_than_roundings(chunk_tokens, is_compiled):
    if is_compiled and not inductor_works(DEVICE):
        pytest.skip("inductor does not work here")
    exact = gradients(torch.float64, TOKENS, is_compiled=False)
    for found, right in zip(gradients(torch.bfloat16, chunk_tokens, is_compiled), exact, strict=True):
        # Logits, their gradients and the results are rounded to bf16, by up to 2**-9 each.
        assert (found.double() - right).norm() < 4 * 2**-9 * right.norm()
