"""GPT-2 as published, written as a program for one device.

Its layers know how they are split over the tensor axis. Nothing in it refers to ZeRO, which wraps the whole model.

ids -> token + position embedding -> dropout -> blocks -> LayerNorm -> logits by the (tied) token embedding
block:  x += dropout(attention(LayerNorm(x)));  x += dropout(down(gelu(up(LayerNorm(x)))))

The residual stream x has shape (tokens, hidden), with the tokens of all sequences one after the other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.model.documents import Documents, needs_mask
from parallel.blocks import RunBlocks, run_in_order
from parallel.errors import ConfigError
from parallel.fields import Range, check_fields
from parallel.mesh import Axis
from parallel.tensor.context import over_context, own_stretch, whole_sequences
from parallel.tensor.gradient_sums import GradientSums
from parallel.tensor.initial_values import fill_normal
from parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenDropout,
    VocabParallelEmbedding,
    column_parallel_linear,
    gather_columns,
    part_of,
    split_dims,
)
from parallel.tensor.linear_cross_entropy import linear_cross_entropy
from parallel.tensor.random_streams import own_random_stream
from parallel.tensor.token_layout import TokenLayout

LAYER_NORM_EPS = 1e-5
INIT_STD = 0.02
RESIDUAL_PROJECTIONS = ("attention.projection.weight", "mlp.down.weight")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2 model."""

    num_layers: Annotated[int, Range(1, 10**7)]
    """Number of transformer blocks."""
    hidden_size: Annotated[int, Range(1, 2**20)]
    """Width of the residual stream; the MLP is four times as wide."""
    num_heads: Annotated[int, Range(1, 2**20)]
    """Number of attention heads; must divide hidden_size."""
    seq_length: Annotated[int, Range(1, 2**30)]
    """Length of the longest sequence, in tokens; the model has as many learned positions."""
    vocab_size: Annotated[int, Range(1, 2**31)]
    """Number of different tokens that the model knows."""
    dropout: Annotated[float, Range(0, below=1)] = 0.1
    """Probability with which an element of an embedding, an attention weight or a residual branch's output is
    dropped."""
    vocab_multiple: Annotated[int, Range(1, 2**20)] = 128
    """The number of rows of the token embedding is rounded up to a multiple of this. Padding is never predicted and
    never changes."""
    attention: Literal["flash", "math"] = "flash"
    """Attention kernel. flash: torch's fused kernel; math: the explicit matrix of scores, as in the ZeRO paper's
    baseline."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size % self.num_heads:
            next_multiple = math.ceil(self.hidden_size / self.num_heads) * self.num_heads
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; "
                f"choose a multiple of {self.num_heads}, such as hidden_size={next_multiple}"
            )

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the token embedding, the same for every tensor size."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


def parameter_shapes(config: ModelConfig, num_rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, whole shape) of each parameter of a model whose token embedding has `num_rows`.

    Nothing is allocated, so the configuration may be that of an unknown file.
    """
    width = config.hidden_size
    linear = {"attention.qkv": (3, 1), "attention.projection": (1, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}
    yield "token_embedding.weight", (num_rows, width)
    yield "position_embedding.weight", (config.seq_length, width)
    for number in range(config.num_layers):
        for name, (rows, columns) in linear.items():
            yield f"blocks.{number}.{name}.weight", (rows * width, columns * width)
            yield f"blocks.{number}.{name}.bias", (rows * width,)
        for norm in ("attention_norm", "mlp_norm"):
            yield f"blocks.{number}.{norm}.weight", (width,)
            yield f"blocks.{number}.{norm}.bias", (width,)
    yield "final_norm.weight", (width,)
    yield "final_norm.bias", (width,)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None = None) -> Tensor:
    """Return causal attention of (batch, heads, seq, head_dim) tensors by torch's fused kernel."""
    if documents is not None:
        return documents.attention(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def math_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Documents | None = None) -> Tensor:
    """Return causal attention of (batch, heads, seq, head_dim) tensors by explicit matrices of scores."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (batch, heads, seq, seq)
    if documents is not None and documents.mask is not None:
        scores += documents.mask
    else:
        is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(is_future, -math.inf)
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


Kernel = Callable[[Tensor, Tensor, Tensor, float, Documents | None], Tensor]
ATTENTION_KERNELS: dict[str, Kernel] = {"flash": flash_attention, "math": math_attention}


class Attention(nn.Module):
    """Multi-head attention, (tokens of this rank, hidden) -> the same; a rank computes its heads for all tokens."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout):
        super().__init__()
        self.head_dim, self.dropout, self.axis = config.head_dim, config.dropout, tokens.axis
        self.context = tokens.context
        self.kernel: Kernel = ATTENTION_KERNELS[config.attention]
        # Rows are ordered (head, q | k | v, head_dim), so that equal parts of the rows are whole heads.
        self.qkv = ColumnParallelLinear(config.hidden_size, 3 * config.hidden_size, tokens)
        self.packed_rows = {"qkv.weight": (config.head_dim,) * 3}
        self.projection = RowParallelLinear(config.hidden_size, config.hidden_size, tokens)

    def forward(self, x: Tensor, num_sequences: int, documents: Documents | None = None) -> Tensor:
        q, k, v = self.split_heads(x, num_sequences)
        return self.project(self.attend(q, k, v, documents))

    def split_heads(self, x: Tensor, num_sequences: int) -> tuple[Tensor, ...]:
        """Return q, k and v of this rank's heads, (batch, own heads, seq, head_dim) each."""
        qkv = self.qkv(x).unflatten(0, (num_sequences, -1)).unflatten(-1, (-1, 3, self.head_dim))
        # Split before the transposes, so that the gradient of the split has the layout of qkv: it is not copied again.
        return tuple(part.transpose(1, 2) for part in qkv.unbind(-2))

    def project(self, attended: Tensor) -> Tensor:
        """Return the output for what `attend` returns."""
        return self.projection(attended.transpose(1, 2).flatten(0, 1).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        """Run the kernel, with another mask of dropout on each rank."""
        probability = self.dropout if self.training else 0.0
        with own_random_stream(self.axis) if probability else nullcontext():
            return over_context(self.kernel, self.context)(q, k, v, probability, documents)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, (tokens of this rank, hidden) -> the same."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout):
        super().__init__()
        self.up = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size, tokens)
        self.down = RowParallelLinear(4 * config.hidden_size, config.hidden_size, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activated(x))

    def activated(self, x: Tensor) -> Tensor:
        """Return the input of the second layer, (all tokens, own columns)."""
        return F.gelu(self.up(x), approximate="tanh")


class Block(nn.Module):
    """A transformer block, (tokens of this rank, hidden) -> the same, for `num_sequences` sequences of one length."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout, layer_norm: type[nn.Module]):
        super().__init__()
        self.attention_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.attention = Attention(config, tokens)
        self.mlp_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config, tokens)
        self.dropout = TokenDropout(config.dropout, tokens)

    def forward(self, x: Tensor, num_sequences: int, documents: Documents | None = None) -> Tensor:
        return self.finish(*self.before_last_product(x, num_sequences, documents))

    def before_last_product(
        self, x: Tensor, num_sequences: int, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the input of the last product, which backward does not need.

        `finish` returns what `forward` does.
        """
        return self.after_attention(x, self.attention(self.attention_norm(x), num_sequences, documents))

    def after_attention(self, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of attention to the residual stream; return what `before_last_product` does."""
        x = x + self.dropout(attention)
        return x, self.mlp.activated(self.mlp_norm(x))

    def finish(self, x: Tensor, activated: Tensor) -> Tensor:
        """Add the last product to the residual stream."""
        return x + self.dropout(self.mlp.down(activated))


class GPT(nn.Module):
    """GPT-2 with torch's default device and dtype; `initialize` gives it its initial values.

    `tokens` is the layout of the residual stream over the tensor axis, which also determines how the layers are split.
    `run_blocks` runs the blocks on their input; activation checkpointing is one way to run them. `layer_norm` is called
    with (hidden_size, eps). With `compiles_loss`, inductor compiles the loss. `gradient_sum_dtype` is the data type in
    which the gradients of replicated parameters are summed along the tensor axis; None: their own. Raises ConfigError
    if the size of the axis does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: TokenLayout,
        run_blocks: RunBlocks | None = None,
        layer_norm: type[nn.Module] = nn.LayerNorm,
        compiles_loss: bool = False,
        gradient_sum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_divides(config, tokens.axis)
        self.compiles_loss = compiles_loss
        self.config, self.tokens, self.run_blocks = config, tokens, run_blocks or run_in_order
        self.token_embedding = VocabParallelEmbedding(config.padded_vocab_size, config.hidden_size, tokens)
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.dropout = TokenDropout(config.dropout, tokens)
        self.blocks = nn.ModuleList(Block(config, tokens, layer_norm) for _ in range(config.num_layers))
        self.final_norm = layer_norm(config.hidden_size, eps=LAYER_NORM_EPS)
        if tokens.num_parts > 1:
            self.gradient_sums = GradientSums(self.parameters_of_own_tokens(), tokens.axis, gradient_sum_dtype)

    def parameters_of_own_tokens(self) -> Iterator[nn.Parameter]:
        """Yield the replicated parameters whose gradient covers only this rank's tokens.

        The gradient of a row-parallel bias covers all tokens.
        """
        for name, param in self.named_parameters():
            if "norm." in name or name.startswith("position_embedding."):
                yield param

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        loss_scale: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the logits (batch, seq, vocab) of int64 ids (batch, seq).

        With targets (batch, seq), return their mean loss, 0-dim, instead; targets below 0 are left out. Pass the factor
        by which the loss is multiplied before backward as `loss_scale`: see `linear_cross_entropy`. Without
        `documents`, each sequence is one document.

        The ranks of a context get the same ids. The loss is that of this rank's stretch of each sequence, and the
        logits are those of whole sequences, without gradients.

        Raises ValueError if the sequence is longer than the model's positions.
        """
        num_sequences, seq_length = ids.shape
        if seq_length > self.config.seq_length:
            raise ValueError(
                f"a sequence of {seq_length} tokens exceeds model.seq_length={self.config.seq_length}; shorten it"
            )
        context = self.tokens.context
        multiple = context.size * self.tokens.num_parts
        if ids.numel() % multiple or seq_length % context.size:
            assert documents is None, "documents are kept apart in sequences that need no padding"
            # Ranks need equal numbers of tokens: pad the end of the sequences, to which no token before it attends.
            num_missing = -seq_length % multiple
            ids = F.pad(ids, (0, num_missing))
            targets = None if targets is None else F.pad(targets, (0, num_missing), value=-1)
        x, weight, vocab_size = self.last_hidden(ids, documents), self.token_embedding.weight, self.config.vocab_size
        if targets is not None:
            return linear_cross_entropy(
                x,
                weight,
                own_stretch(targets, context).flatten(),
                vocab_size,
                self.tokens,
                loss_scale=loss_scale,
                is_compiled=self.compiles_loss,
            )
        logits = gather_columns(column_parallel_linear(x, weight, None, self.tokens), self.tokens.axis)
        own_logits = logits[:, :vocab_size].unflatten(0, (num_sequences, -1))
        return whole_sequences(own_logits, context)[:, :seq_length]

    def last_hidden(self, ids: Tensor, documents: Documents | None = None) -> Tensor:
        """Return what the head is applied to, (tokens of this rank, hidden)."""
        num_sequences, seq_length = ids.shape
        if documents is None:
            positions = torch.arange(seq_length, device=ids.device).clamp_(max=self.config.seq_length - 1)
            positions = positions.repeat(num_sequences, 1)
        else:
            positions = documents.positions
        ids, positions = (own_stretch(whole, self.tokens.context).flatten() for whole in (ids, positions))
        embedded = self.token_embedding(ids) + self.position_embedding(self.tokens.cut(positions))
        dropout = self.config.dropout if self.training else 0.0
        if documents and needs_mask(self.config.attention, self.config.head_dim, dropout, embedded):
            documents = documents.with_mask(embedded.dtype)
        blocks = [partial(block, num_sequences=num_sequences, documents=documents) for block in self.blocks]
        return self.final_norm(self.run_blocks(blocks, self.dropout(embedded)))


def check_divides(config: ModelConfig, axis: Axis) -> None:
    """Raise ConfigError unless every rank of the axis gets equal parts of the heads, the width and the vocabulary."""
    for name, size in (("model.num_heads", config.num_heads), ("model.hidden_size", config.hidden_size)):
        part_of(size, axis, name)
    part_of(config.padded_vocab_size, axis, "model.vocab_size rounded up to model.vocab_multiple")


def initialize(model: GPT, seed: int, data: Axis | None = None) -> None:
    """Give the model GPT-2's initial values.

    They depend on the seed only, not on the order of construction, the device or the mesh; a dtype of less precision
    rounds them. The ranks of `data` share the work; if it is None, this rank does all of it.
    """
    dims, data = split_dims(model), data or Axis.trivial("data")
    with torch.no_grad():
        for name, param in model.named_parameters():
            std = initial_std(name, model.config.num_layers)
            if std is None:
                param.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                fill_normal(param, std, f"{seed}/{name}", dims.get(name), model.tokens.axis, data)
        first_padding = model.config.vocab_size - model.token_embedding.first_word
        model.token_embedding.weight[max(first_padding, 0) :] = 0.0


def initial_std(name: str, num_layers: int) -> float | None:
    """Return the standard deviation of a parameter's initial values, or None if they are constant.

    It is 0.02, divided by sqrt(2 num_layers) for weights whose output is added to the residual stream.
    """
    if name.endswith(("norm.weight", "bias")):
        return None
    return INIT_STD / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else INIT_STD
