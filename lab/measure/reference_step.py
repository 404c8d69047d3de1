"""A training step of a small transformer of torch's own modules, by which a preflight measures kernels in a step.

A kernel takes longer there than by itself: its inputs have left the caches, its outputs are in memory that was just
allocated, and other ranks use the same memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.measure.bandwidth import measured_seconds
from lab.observe.kernel_log import Kernel, kernels_of

BUDGET_SECONDS = 1.0  # for which a step is repeated


@dataclass(frozen=True)
class Shape:
    """The sizes of the transformer and of its batch."""

    num_layers: int
    width: int
    num_heads: int
    seq_length: int
    num_sequences: int
    vocab_size: int


SHAPES = {"cpu": Shape(3, 384, 6, 256, 2, 4096), "cuda": Shape(4, 2048, 16, 2048, 4, 32768)}


class Block(nn.Module):
    """Attention and an MLP, each behind a norm, (batch, seq, width) -> the same."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.num_heads = shape.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv, self.projection = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def reference_step(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    shape = SHAPES[device.type]
    with torch.device(device):
        blocks = [Block(shape) for _ in range(shape.num_layers)]
        model = nn.Sequential(nn.Embedding(shape.vocab_size, shape.width), *blocks, nn.LayerNorm(shape.width))
        model.append(nn.Linear(shape.width, shape.vocab_size, bias=False)).to(dtype)
        ids = torch.randint(shape.vocab_size, (shape.num_sequences, shape.seq_length))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_reference_step(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of a step, with its waits. All ranks of a node should do it at the same time, as in a run."""
    return measured_seconds(reference_step(device, dtype), device, budget=BUDGET_SECONDS, counts_waiting=True)


def reference_kernels(device: torch.device, dtype: torch.dtype) -> Sequence[Kernel]:
    step = reference_step(device, dtype)
    step()  # makes the optimizer's states
    return kernels_of(step)
