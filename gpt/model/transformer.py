"""A GPT, written as a program for one device; by default GPT-2 as published.

Its layers know how they are split over the tensor axis. Nothing in it refers to ZeRO, which wraps the whole model.

ids -> token (+ position) embedding -> dropout -> blocks -> norm -> logits by the head, or by the token embedding
block:  x += dropout(attention(norm(x)));  x += dropout(down(activation(up(norm(x)))))

The residual stream x has shape (tokens, hidden), with the tokens of all sequences one after the other. Tables give the
part that an option of the configuration names: NORMS, POSITIONS, ACTIVATIONS, ATTENTION_KERNELS.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.kernels.attention import ATTENTION_KERNELS, Kernel
from gpt.kernels.documents import Documents, needs_mask
from gpt.kernels.norms import NORMS
from gpt.model.mup import hidden_factor
from gpt.model.rotary import Rotation, rotated, tables
from gpt.shape.config import ROWS_PER_UNIT, ModelConfig, check_divides
from parallel.mesh import Axis
from parallel.tensor.blocks import RunBlocks, run_in_order
from parallel.tensor.context import over_context, own_stretch, whole_sequences
from parallel.tensor.gradient_sums import GradientSums
from parallel.tensor.heads import GroupedHeads, PackedHeads
from parallel.tensor.initial_values import fill_normal
from parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenDropout,
    VocabParallelEmbedding,
    gathered_linear,
)
from parallel.tensor.linear_cross_entropy import linear_cross_entropy
from parallel.tensor.random_streams import own_random_stream
from parallel.tensor.softmax import Softmax, capped
from parallel.tensor.split_parameters import shared_dims, split_dims
from parallel.tensor.token_layout import TokenLayout

INIT_STD = 0.02
RESIDUAL_PROJECTIONS = ("attention.projection.weight", "mlp.down.weight")


class Sequences(NamedTuple):
    """The sequences of a batch, all of one length, as far as blocks need to know them."""

    number: int
    rotation: Rotation | None = None  # of each position, if positions are rotary
    documents: Documents | None = None  # None: each sequence is one document


class LearnedPositions(nn.Module):
    """A vector for each position, which is added to the embeddings of tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.seq_length, config.hidden_size))

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return embedded + F.embedding(positions, self.weight)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Return None: queries and keys are not rotated."""


class RotaryPositions(nn.Module):
    """Angles of each position, by which queries and keys are rotated; embeddings are left as they are."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tables: Rotation | None = None  # made in the first forward; not buffers, which a checkpoint would contain

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return embedded

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the cosines and sines of positions (..., seq), (..., seq, head_dim) each."""
        if self.tables is None or self.tables[0].device != positions.device or self.tables[0].dtype != dtype:
            self.tables = tables(self.config, positions.device, dtype)
        cosines, sines = self.tables
        return cosines[positions], sines[positions]


Positions = LearnedPositions | RotaryPositions
POSITIONS: dict[str, Callable[[ModelConfig], Positions]] = {"learned": LearnedPositions, "rope": RotaryPositions}


class Attention(nn.Module):
    """Multi-head attention, (tokens of this rank, hidden) -> the same; a rank computes its heads for all tokens."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.dropout, self.axis, self.context = config.dropout, tokens.axis, tokens.context
        self.kernel: Kernel = partial(ATTENTION_KERNELS[config.attention], scale=config.attention_scale)
        width, num_heads, head_dim = config.hidden_size, config.num_heads, config.head_size
        has_bias = config.biases or config.qkv_bias
        if config.kv_heads < num_heads:
            self.qkv: nn.Module = GroupedHeads(width, num_heads, config.kv_heads, head_dim, tokens, has_bias)
        else:
            self.qkv = PackedHeads(width, num_heads, head_dim, tokens, has_bias)
        norm_of_heads = norm if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = (norm_of_heads(head_dim, eps=config.norm_eps) for _ in "qk")
        self.projection = RowParallelLinear(num_heads * head_dim, width, tokens, config.biases)
        # Each rank normalizes its own heads only.
        self.shared_dims = {f"{name}.{part}": None for name in ("q_norm", "k_norm") for part in ("weight", "bias")}

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        q, k, v = self.split_heads(x, sequences)
        return self.project(self.attend(q, k, v, sequences.documents))

    def split_heads(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """Return q, k and v of this rank's heads, (batch, own heads, seq, head_dim) each."""
        q, k, v = self.qkv(x, sequences.number)
        # The heads are split before the transposes, so that the gradient of the split has the layout of the product: it
        # is not copied again.
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        return rotated(q, sequences.rotation), rotated(k, sequences.rotation), v

    def project(self, attended: Tensor) -> Tensor:
        """Return the output for what `attend` returns."""
        return self.projection(attended.transpose(1, 2).flatten(0, 1).flatten(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        """Run the kernel, with another mask of dropout on each rank."""
        probability = self.dropout if self.training else 0.0
        with own_random_stream(self.axis) if probability else nullcontext():
            return over_context(self.kernel, self.context)(q, k, v, probability, documents)


def gelu(up: Tensor) -> Tensor:
    """Return the GELU of each unit, in its tanh approximation."""
    return F.gelu(up, approximate="tanh")


def relu2(up: Tensor) -> Tensor:
    """Return the square of the positive part of each unit (So et al., 2021)."""
    return F.relu(up).square()


def swiglu(up: Tensor) -> Tensor:
    """Return silu(gate) * up of each unit. Columns are ordered (unit, gate | up): equal parts are whole units."""
    gate, up = up.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu2": relu2, "swiglu": swiglu}


class MLP(nn.Module):
    """Two linear layers with an activation function between them; a block runs `activated` and then `down`."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout):
        super().__init__()
        num_rows, self.activation = ROWS_PER_UNIT[config.mlp], ACTIVATIONS[config.mlp]
        self.packed_rows = {"up.weight": (1,) * num_rows} if num_rows > 1 else {}
        self.up = ColumnParallelLinear(config.hidden_size, num_rows * config.mlp_size, tokens, config.biases)
        self.down = RowParallelLinear(config.mlp_size, config.hidden_size, tokens, config.biases)

    def activated(self, x: Tensor) -> Tensor:
        """Return the input of the second layer, (all tokens, own columns)."""
        return self.activation(self.up(x))


class Block(nn.Module):
    """A transformer block, (tokens of this rank, hidden) -> the same, for the sequences of one batch."""

    def __init__(self, config: ModelConfig, tokens: TokenLayout, norm: type[nn.Module]):
        super().__init__()
        self.attention_norm = norm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, tokens, norm)
        self.mlp_norm = norm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config, tokens)
        self.dropout = TokenDropout(config.dropout, tokens)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return self.finish(*self.before_last_product(x, sequences))

    def before_last_product(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the input of the last product, which backward does not need.

        `finish` returns what `forward` does.
        """
        return self.after_attention(x, self.attention(self.attention_norm(x), sequences))

    def after_attention(self, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of attention to the residual stream; return what `before_last_product` does."""
        x = x + self.dropout(attention)
        return x, self.mlp.activated(self.mlp_norm(x))

    def finish(self, x: Tensor, activated: Tensor) -> Tensor:
        """Add the last product to the residual stream."""
        return x + self.dropout(self.mlp.down(activated))


class GPT(nn.Module):
    """A GPT with torch's default device and dtype; `initialize` gives it its initial values.

    `tokens` is the layout of the residual stream over the tensor axis, which also determines how the layers are split.
    `run_blocks` runs the blocks on their input; activation checkpointing is one way to run them. `norm` is called with
    (size, eps); None: torch's norm. With `compiles_loss`, inductor compiles the loss. `gradient_sum_dtype` is the data
    type in which the gradients of replicated parameters are summed along the tensor axis; None: their own. Raises
    ConfigError if the size of the axis does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: TokenLayout,
        run_blocks: RunBlocks | None = None,
        norm: type[nn.Module] | None = None,
        compiles_loss: bool = False,
        gradient_sum_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_divides(config, tokens.axis)
        norm = norm or NORMS[config.norm]
        self.softmax = Softmax(compiles_loss, config.logit_cap)
        self.config, self.tokens, self.run_blocks = config, tokens, run_blocks or run_in_order
        self.token_embedding = VocabParallelEmbedding(config.padded_vocab_size, config.hidden_size, tokens)
        self.position_embedding = POSITIONS[config.positions](config)
        self.dropout = TokenDropout(config.dropout, tokens)
        self.blocks = nn.ModuleList(Block(config, tokens, norm) for _ in range(config.num_layers))
        self.final_norm = norm(config.hidden_size, eps=config.norm_eps)
        if not config.tied_head:
            self.head = VocabParallelEmbedding(config.padded_vocab_size, config.hidden_size, tokens)
        if summed := list(self.parameters_of_partial_gradients()):
            self.gradient_sums = GradientSums(summed, tokens.axis, gradient_sum_dtype)

    @property
    def head_weight(self) -> nn.Parameter:
        """The weight of the head, (own words, hidden)."""
        return (self.token_embedding if self.config.tied_head else self.head).weight

    def parameters_of_partial_gradients(self) -> Iterator[nn.Parameter]:
        """Yield the replicated parameters of whose gradients each rank computes a part.

        The parts are of its tokens, or of its heads. The gradient of a row-parallel bias covers all tokens.
        """
        of_own_heads = shared_dims(self) if self.tokens.axis.size > 1 else {}
        for name, param in self.named_parameters():
            is_of_own_tokens = self.tokens.num_parts > 1 and ("norm." in name or name.startswith("position_embedding."))
            if is_of_own_tokens or name in of_own_heads:
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
        x, weight, vocab_size = self.last_hidden(ids, documents), self.head_weight, self.config.vocab_size
        if targets is not None:
            return linear_cross_entropy(
                x,
                weight,
                own_stretch(targets, context).flatten(),
                vocab_size,
                self.tokens,
                loss_scale=loss_scale,
                softmax=self.softmax,
            )
        logits = gathered_linear(x, weight, self.tokens)
        if self.softmax.cap is not None:
            logits = capped(logits, self.softmax.cap).to(logits.dtype)
        own_logits = logits[:, :vocab_size].unflatten(0, (num_sequences, -1))
        return whole_sequences(own_logits, context)[:, :seq_length]

    def last_hidden(self, ids: Tensor, documents: Documents | None = None) -> Tensor:
        """Return what the head is applied to, (tokens of this rank, hidden)."""
        num_sequences, seq_length = ids.shape
        positions = torch.arange(seq_length, device=ids.device).clamp_(max=self.config.seq_length - 1)[None]
        if documents is not None:
            positions = documents.positions
        ids, positions = (own_stretch(whole, self.tokens.context) for whole in (ids, positions))
        of_own_tokens = self.tokens.cut(positions.expand(num_sequences, -1).flatten())
        embedded = self.position_embedding(self.token_embedding(ids.flatten()), of_own_tokens)
        rotation = self.position_embedding.rotation(positions[:, None], embedded.dtype)  # one for all heads
        dropout = self.config.dropout if self.training else 0.0
        if documents and needs_mask(self.config.attention, self.config.head_size, dropout, embedded):
            documents = documents.with_mask(embedded.dtype)
        blocks = [partial(block, sequences=Sequences(num_sequences, rotation, documents)) for block in self.blocks]
        hidden = self.final_norm(self.run_blocks(blocks, self.dropout(embedded)))
        # By muP, logits are divided by the width; this has fewer elements than they have.
        return hidden if self.config.width_multiplier == 1 else hidden * (1 / self.config.width_multiplier)


def initialize(model: GPT, seed: int, data: Axis | None = None) -> None:
    """Give the model initial values with the spread of GPT-2's.

    They depend on the seed only, not on the order of construction, the device or the mesh; a dtype of less precision
    rounds them. The ranks of `data` share the work; if it is None, this rank does all of it.
    """
    dims, shared, data = split_dims(model), shared_dims(model), data or Axis.trivial("data")
    with torch.no_grad():
        for name, param in model.named_parameters():
            std = initial_std(name, param, model.config)
            if std is None:
                param.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            elif name in shared:  # whole, and with the values that it has where it is split
                fill_normal(param, std, f"{seed}/{name}", shared[name], model.tokens.axis.without_peers(), data)
            else:
                fill_normal(param, std, f"{seed}/{name}", dims.get(name), model.tokens.axis, data)
        for weight in {model.token_embedding.weight, model.head_weight}:
            weight[max(model.config.vocab_size - model.token_embedding.first_word, 0) :] = 0.0


def initial_std(name: str, param: nn.Parameter, config: ModelConfig) -> float | None:
    """Return the standard deviation of a parameter's initial values, or None if they are constant.

    It is 0.02, divided by sqrt(2 num_layers) for weights whose output is added to the residual stream. With muP, that
    of hidden matrices falls with the width.
    """
    if name.endswith(("norm.weight", "bias")):
        return None
    std = INIT_STD / math.sqrt(2 * config.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else INIT_STD
    return std * math.sqrt(hidden_factor(name, param, config))
