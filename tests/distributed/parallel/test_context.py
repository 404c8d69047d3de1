"""Attention whose sequences are divided over ranks equals that of whole sequences, and sends what its formula says."""

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.mesh import Mesh
from parallel.tensor.context import over_context
from tests.ranks import run_cases

BATCH, SEQ, HEAD_DIM = 2, 12, 4


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def heads_of(num_heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, num_heads, SEQ, HEAD_DIM, dtype=torch.float64, generator=generator)


def distances(num_heads: int, num_kv_heads: int, context_size: int) -> tuple[list[float], int]:
    """Return the largest differences of the output and the gradients from one process, and the bytes that were sent."""
    mesh = Mesh.create(tensor_size=1, context_size=context_size)
    axis = mesh.context
    whole = [heads_of(number, seed).requires_grad_() for seed, number in enumerate((num_heads, *[num_kv_heads] * 2))]
    expected = attention(*whole, 0.3)
    grad = heads_of(num_heads, 9)
    expected.backward(grad)

    def stretch(tensor: Tensor) -> Tensor:
        return tensor.detach().chunk(axis.size, dim=2)[axis.rank]

    own = [stretch(tensor).clone().requires_grad_() for tensor in whole]
    found = over_context(attention, axis)(*own, 0.3)
    found.backward(stretch(grad))
    pairs = [(found, stretch(expected)), *((a.grad, stretch(b.grad)) for a, b in zip(own, whole, strict=True))]
    return [(a - b).abs().max().item() for a, b in pairs], mesh.log.wire_bytes(axis="context")


def test_attention_over_stretches_equals_attention_over_whole_sequences():
    cases = [(4, 4, 4), (8, 4, 4), (4, 2, 2), (2, 2, 1)]
    for (num_heads, num_kv_heads, size), found in zip(cases, run_cases(4, distances, cases), strict=True):
        for differences, sent in found:
            assert max(differences) < 1e-12
            # q, k, v and the output, forward and backward; each rank keeps its own part.
            numel = BATCH * SEQ // size * HEAD_DIM * 2 * (num_heads + num_kv_heads)
            assert sent == 2 * numel * 8 * (size - 1) // size
