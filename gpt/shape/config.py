"""The shape of a GPT: sizes, and which part stands in each place of a block. By default it is GPT-2 as published."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from parallel.mesh import Axis
from parallel.tensor.layers import part_of
from parallel.validation.errors import ConfigError
from parallel.validation.fields import Positive, Range, checked

ROWS_PER_UNIT = {"gelu": 1, "relu2": 1, "swiglu": 2}  # of the up projection: SwiGLU's has a gate for each unit


@checked
class RopeScaling:
    """Llama 3's scaling of the frequencies of rotary positions, for sequences longer than those of its pretraining."""

    factor: Annotated[float, Range(1, 1e6)] = 8.0
    """Number by which low frequencies are divided."""
    low_freq_factor: Annotated[float, Range(above=0, at_most=1e6)] = 1.0
    """A frequency is low if it turns less often than this in original_seq_length tokens."""
    high_freq_factor: Annotated[float, Range(above=0, at_most=1e6)] = 4.0
    """A frequency is high, and unchanged, if it turns more often than this; those in between are interpolated."""
    original_seq_length: Annotated[int, Range(1, 2**30)] = 8192
    """Length of the sequences of the first pretraining."""

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}; choose 1 and 4"
            )


@checked
class ModelConfig:
    """The shape of the model. The defaults are those of GPT-2; configs/models has Llama's, Qwen 3's and Mistral's."""

    num_layers: Annotated[int, Range(1, 10**7)]
    """Number of transformer blocks."""
    hidden_size: Annotated[int, Range(1, 2**20)]
    """Width of the residual stream."""
    num_heads: Annotated[int, Range(1, 2**20)]
    """Number of attention heads; must divide hidden_size unless head_dim is given."""
    seq_length: Annotated[int, Range(1, 2**30)]
    """Length of the longest sequence, in tokens; with learned positions the model has as many of them."""
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
    positions: Literal["learned", "rope"] = "learned"
    """learned: a vector for each position is added to the token embedding; rope: queries and keys are rotated by angles
    that are proportional to the position (RoPE)."""
    rope_theta: Annotated[float, Range(above=1, at_most=1e12)] = 10000.0
    """Base of the wavelengths of rope."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the frequencies of rope as in Llama 3.1; null: none."""
    norm: Literal["layer", "rms"] = "layer"
    """layer: LayerNorm, with a bias; rms: RMSNorm, which neither subtracts the mean nor has a bias."""
    norm_eps: Annotated[float, Range(above=0, at_most=1)] = 1e-5
    """Number added to the variance in norms, against division by zero."""
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"
    """gelu: down(gelu(up(x))), in the tanh approximation; relu2: down(relu(up(x))^2); swiglu: down(silu(gate(x)) *
    up(x)), which has half as many parameters more at the same width."""
    mlp_width: Annotated[int, Range(1, 2**24)] | None = None
    """Width of the MLP; null: four times hidden_size."""
    num_kv_heads: Positive | None = None
    """Number of heads of keys and values, each of which is shared by a group of equally many attention heads; must
    divide num_heads. null: num_heads."""
    head_dim: Annotated[int, Range(1, 2**16)] | None = None
    """Width of an attention head; null: hidden_size / num_heads."""
    qk_norm: bool = False
    """Normalize each head's queries and keys, before they are rotated."""
    biases: bool = True
    """Linear layers of the blocks have a bias."""
    qkv_bias: bool = False
    """Without biases, queries, keys and values have one nevertheless, as in Qwen 2."""
    tied_head: bool = True
    """The head is the token embedding; false: it has a weight of its own."""
    logit_cap: Annotated[float, Range(above=0, at_most=1e6)] | None = None
    """Cap logits softly: cap * tanh(logits / cap); Gemma 2 has 30. null: no cap."""
    mup_base_width: Annotated[int, Range(1, 2**20)] | None = None
    """Scale initial values, learning rates and logits with hidden_size by maximal-update parametrization (muP), so that
    settings that are best at this hidden_size stay so; at this hidden_size it changes nothing. null: do not scale."""
    mup_base_head_dim: Annotated[int, Range(1, 2**16)] | None = None
    """Width of an attention head at mup_base_width, by which muP scales attention scores; null: that of this model, so
    that a wider model has more heads."""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            next_multiple = math.ceil(self.hidden_size / self.num_heads) * self.num_heads
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; "
                f"choose a multiple of {self.num_heads}, such as hidden_size={next_multiple}"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}; choose "
                f"a divisor of {self.num_heads}"
            )
        if self.mup_base_head_dim is not None and self.mup_base_width is None:
            raise ConfigError(
                f"model.mup_base_head_dim={self.mup_base_head_dim} needs model.mup_base_width; choose both"
            )
        if self.positions == "rope" and self.head_size % 2:
            raise ConfigError(
                f"model.positions=rope rotates pairs, and heads have an odd width of {self.head_size}; choose an even "
                "model.head_dim"
            )

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> "ModelConfig":
        """Return the configuration that `dataclasses.asdict` has made plain; what is missing has its default."""
        values = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        if isinstance(scaling := values.get("rope_scaling"), dict):
            names = [field.name for field in fields(RopeScaling)]
            values["rope_scaling"] = RopeScaling(**{name: scaling[name] for name in names if name in scaling})
        return cls(**values)

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_size(self) -> int:
        """The width of the MLP."""
        return 4 * self.hidden_size if self.mlp_width is None else self.mlp_width

    @property
    def width_multiplier(self) -> float:
        """The width as a multiple of muP's base width; 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def attention_scale(self) -> float | None:
        """The number by which attention scores are multiplied; None: 1 / sqrt(head_size), which kernels have."""
        base = self.scaled_head_dim
        return None if base is None else math.sqrt(base) / self.head_size

    @property
    def scaled_head_dim(self) -> int | None:
        """The width of a head at muP's base width, if it is another one than here; else None."""
        return None if self.mup_base_head_dim == self.head_size else self.mup_base_head_dim

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the token embedding, the same for every tensor size."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The (rows, columns) of the weights of a block's linear layers, by the layer's name and its weight's prefix.

        Queries have a weight apart from keys and values if heads are grouped.
        """
        queries, keys = self.num_heads * self.head_size, self.kv_heads * self.head_size
        qkv = {"attention.qkv.": queries + 2 * keys}
        if self.kv_heads < self.num_heads:
            qkv = {"attention.qkv.q_": queries, "attention.qkv.kv_": 2 * keys}
        return {
            **{name: (rows, self.hidden_size) for name, rows in qkv.items()},
            "attention.projection.": (self.hidden_size, queries),
            "mlp.up.": (ROWS_PER_UNIT[self.mlp] * self.mlp_size, self.hidden_size),
            "mlp.down.": (self.hidden_size, self.mlp_size),
        }

    @property
    def block_width(self) -> int:
        """The number of elements that a block keeps for each token inside its split layers: 12 hidden_size in GPT-2.

        They are q, k and v, the output of attention, and the MLP before and after its activation function. RoPE and
        norms of heads make other q and k; the products are kept beside them if v is a part of these, or if a norm needs
        its input. SwiGLU keeps silu(gate) too.
        """
        queries, keys = self.num_heads * self.head_size, self.kv_heads * self.head_size
        is_changed = self.qk_norm or self.positions == "rope"
        keeps_product = not is_changed or self.qk_norm or keys == queries
        heads = (queries if keeps_product else 0) + 2 * keys + (queries + keys if is_changed else 0) + queries
        return heads + {"gelu": 2, "relu2": 2, "swiglu": 4}[self.mlp] * self.mlp_size

    @property
    def block_weights(self) -> int:
        """The number of elements of the weights of a block's linear layers: 12 hidden_size^2 in GPT-2."""
        return sum(rows * columns for rows, columns in self.linear_shapes.values())


def parameter_shapes(config: ModelConfig, num_rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, whole shape) of each parameter of a model whose token embedding has `num_rows`.

    Nothing is allocated, so the configuration may be that of an unknown file.
    """
    width = config.hidden_size
    norm = ("weight", "bias") if config.norm == "layer" else ("weight",)
    norms = {"attention_norm": width, "mlp_norm": width}
    if config.qk_norm:
        norms |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), config.head_size)
    yield "token_embedding.weight", (num_rows, width)
    if config.positions == "learned":
        yield "position_embedding.weight", (config.seq_length, width)
    for number in range(config.num_layers):
        for name, shape in config.linear_shapes.items():
            yield f"blocks.{number}.{name}weight", shape
            if config.biases or (config.qkv_bias and name.startswith("attention.qkv.")):
                yield f"blocks.{number}.{name}bias", shape[:1]
        for name, size in norms.items():
            yield from ((f"blocks.{number}.{name}.{part}", (size,)) for part in norm)
    yield from ((f"final_norm.{part}", (width,)) for part in norm)
    if not config.tied_head:
        yield "head.weight", (num_rows, width)


def check_divides(config: ModelConfig, axis: Axis) -> None:
    """Raise ConfigError unless every rank of the axis gets equal parts of the heads, the MLP and the vocabulary.

    Heads of keys and values may also be fewer than the ranks, if the ranks that share one are equally many.
    """
    part_of(config.num_heads, axis, "model.num_heads")
    part_of(config.mlp_size, axis, "the width of the MLP")
    part_of(config.padded_vocab_size, axis, "model.vocab_size rounded up to model.vocab_multiple")
    if axis.size % config.kv_heads:
        part_of(config.kv_heads, axis, "model.num_kv_heads")
