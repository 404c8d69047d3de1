"""GPT-2 as published, as a program for one device: how it is trained in parallel is decided around it, not in it.

tokens -> token + position embedding -> dropout -> blocks -> LayerNorm -> logits by the (tied) token embedding
block:  x += dropout(attention(LayerNorm(x)));  x += dropout(down(gelu(up(LayerNorm(x)))))
"""

import hashlib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.errors import ConfigError
from parallel.mesh import Axis

RunBlocks = Callable[[nn.ModuleList, Tensor], Tensor]

LAYER_NORM_EPS = 1e-5
INIT_STD = 0.02
RESIDUAL_PROJECTIONS = ("attention.projection.weight", "mlp.down.weight")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2. Raises ConfigError where no such model exists."""

    num_layers: int
    """Transformer blocks."""
    hidden_size: int
    """Width of the residual stream; the MLP is four times as wide."""
    num_heads: int
    """Attention heads; divides hidden_size."""
    seq_length: int
    """Longest sequence, in tokens: the number of learned positions."""
    vocab_size: int
    """Rows of the token embedding."""
    dropout: float = 0.1
    """Probability of dropping an embedding, an attention weight or a residual branch's output."""
    attention: Literal["flash", "math"] = "flash"
    """flash: torch's fused kernel; math: the explicit seq x seq matrix, as in the ZeRO paper's baseline."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)} is below 1; choose a positive number")
        if self.hidden_size % self.num_heads:
            next_multiple = math.ceil(self.hidden_size / self.num_heads) * self.num_heads
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; "
                f"choose a multiple of {self.num_heads}, such as hidden_size={next_multiple}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout={self.dropout} is outside [0, 1); choose 0 to switch dropout off")
        if self.attention not in ATTENTION_KERNELS:
            names = " or ".join(ATTENTION_KERNELS)
            raise ConfigError(f"model.attention={self.attention} is unknown; choose {names}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def math_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (batch, heads, seq, seq)
    is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill_(is_future, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout) @ v


ATTENTION_KERNELS = {"flash": flash_attention, "math": math_attention}


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.kernel = ATTENTION_KERNELS[config.attention]
        # Rows are ordered (head, q | k | v, head_dim): an equal cut of the rows is a cut between whole heads.
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # (batch, seq, heads, 3, head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (batch, heads, seq, head_dim) each
        attended = self.kernel(q, k, v, self.dropout if self.training else 0.0)
        return self.projection(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """(batch, seq, hidden) -> (batch, seq, hidden)."""

    def __init__(self, config: ModelConfig, layer_norm: type[nn.Module]):
        super().__init__()
        self.attention_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def run_in_order(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class GPT(nn.Module):
    """GPT-2 with torch's default device and dtype; `initialize` gives it its initial values.

    `run_blocks` takes the blocks and their input (batch, seq, hidden) to their output; activation checkpointing is
    another way of running them. `layer_norm` is a choice of `choose_layer_norm`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensor: Axis,
        run_blocks: RunBlocks | None = None,
        layer_norm: type[nn.Module] = nn.LayerNorm,
    ):
        super().__init__()
        if tensor.size > 1:
            raise ConfigError(f"parallel.tensor_size={tensor.size}, but this model's layers split 1 way only; choose 1")
        self.config = config
        self.run_blocks = run_blocks or run_in_order
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer_norm) for _ in range(config.num_layers))
        self.final_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab) of int64 tokens (batch, seq); given targets (batch, seq), their mean loss.

        Raises ValueError where the sequence is longer than the model's positions.
        """
        seq_length = tokens.shape[1]
        if seq_length > self.config.seq_length:
            raise ValueError(
                f"a sequence of {seq_length} tokens exceeds model.seq_length={self.config.seq_length}; shorten it"
            )
        positions = torch.arange(seq_length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        x = self.final_norm(self.run_blocks(self.blocks, x))
        logits = F.linear(x, self.token_embedding.weight)
        return logits if targets is None else cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in fp32 at least. Keeps one tensor of the logits' size for backward."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # log_softmax upcasts inside its kernel where it can, so that no fp32 copy of the logits is made.
    log_probabilities = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=dtype)
    return F.nll_loss(log_probabilities, targets.flatten())


def initialize(model: GPT, seed: int) -> None:
    """GPT-2's initial values, the same whatever the order of construction, the dtype (rounded) or the device."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial_value(name, param.shape, model.config.num_layers, seed))


def initial_value(name: str, shape: torch.Size, num_layers: int, seed: int) -> Tensor:
    """One whole parameter in fp32: N(0, 0.02), less by sqrt(2 num_layers) where it writes to the residual stream."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    std = INIT_STD / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else INIT_STD
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


def choose_layer_norm(device: torch.device) -> tuple[type[nn.Module], str]:
    """NVIDIA apex's fused LayerNorm on a CUDA device where it works, else torch's; and its name for the log."""
    if device.type == "cuda":
        try:
            fused = importlib.import_module("apex.normalization").FusedLayerNorm
            fused(1)  # apex imports without its CUDA extension and fails here
            return fused, "apex.normalization.FusedLayerNorm"
        except (ImportError, AttributeError):
            pass  # absent, built without CUDA, or the unrelated package that PyPI calls apex
    return nn.LayerNorm, "torch.nn.LayerNorm"
