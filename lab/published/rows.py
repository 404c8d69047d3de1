"""The rows of published throughputs. docs/published has the columns, and what a row stands for."""

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from gpt.formats.config_files import read_text
from lab.pages.markdown import ROOT
from parallel.validation.errors import ConfigError

ROWS = ROOT / "configs/published/rows.csv"
LATE_ROWS = ROOT / "configs/published/fp8_rows.csv"
HALF = "fp16", "bf16"
FSDP_SOURCES = (
    "MosaicML", "PyTorch FSDP", "torchtitan", "torchao", "AWS torchtitan", "fms-fsdp", "JAX-Toolbox", "MaxText",
    "NeMo AutoModel",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str = ""
    gpu: str = ""
    cluster: str = ""
    node_gbps: float = 0.0  # that of the cluster file
    gpus: int = 0  # like other sizes of 0, refused
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocab: int = 0
    seq: int = 0
    stage: int = 0
    tp: int = 1
    sequence_parallel: int = 0
    micro: int = 1
    global_batch: int = 0
    store: str = "keep"
    attention: str = "flash"
    dropout: float = 0.0
    precision: str = "bf16"
    basis: str = "6P+12Lhs"
    published_tflops: float = math.nan
    reduce_dtype: str = "bf16"
    doubt: int = 0
    notes: str = ""
    kv_heads: int = 0  # those of `heads`
    mlp_hidden: int = 0  # four times `hidden`
    mlp_kind: str = ""
    norm: str = "layernorm"
    tied_head: int = 1
    gemm_precision: str = ""  # of linear layers; rows that say it are of programs of 2024 and later
    fp8_gather: int = 0
    context_parallel: int = 1
    pipeline: int = 1
    compiled: int = 0
    async_tp: int = 0
    cuda_graph: int = 0
    recompute_detail: str = ""
    optimizer: str = ""

    def __post_init__(self) -> None:
        sizes = self.gpus, self.layers, self.hidden, self.heads, self.seq, self.tp, self.micro, self.global_batch
        if min(*sizes, self.context_parallel, self.pipeline) < 1:
            raise ConfigError(f"row {self.id} has a size below 1; correct it")

    @classmethod
    def parse(cls, values: dict[str, str]) -> Self:
        """Return the row of a line of a CSV file. Unknown columns are left out, and empty ones have their default."""
        if not values.get("id"):
            raise ConfigError("a row has no id; name it")
        known = {field.name: field.type for field in fields(cls)}
        types: dict[Any, Any] = {int: lambda text: round(float(text)), float: float, str: str}
        found = {name: types[kind](values[name]) for name, kind in known.items() if values.get(name)}
        return cls(**found)

    @property
    def data_size(self) -> int:
        """The ranks over which the states are divided, those of a context included."""
        return max(1, self.gpus // (self.tp * self.pipeline))

    @property
    def num_batch_ranks(self) -> int:
        return max(1, self.data_size // self.context_parallel)

    @property
    def micro_batch_size(self) -> int:
        """The sequences of a micro-batch; all that a GPU has in a step if these are fewer than published."""
        return max(1, min(self.micro, self.global_batch // self.num_batch_ranks))

    @property
    def num_micro_batches(self) -> float:
        """The micro-batches of a step; the last one may be a part of one."""
        return max(1.0, self.global_batch / self.num_batch_ranks / self.micro_batch_size)

    @property
    def is_gpt2(self) -> bool:
        """True if blocks have biases and positions are learned, or stand for such as are."""
        return self.mlp_kind in ("", "gelu")

    @property
    def block_weights(self) -> int:
        """The parameters of the matrices of a block."""
        attention = 2 * (1 + (self.kv_heads or self.heads) / self.heads) * self.hidden**2
        return round(attention) + (3 if self.mlp_kind == "swiglu" else 2) * self.hidden * self.mlp_width

    @property
    def mlp_width(self) -> int:
        return self.mlp_hidden or 4 * self.hidden

    @property
    def parameters(self) -> int:
        """The parameters of a model of the row's shape, a GPT-2 or a Llama."""
        others = 13 * self.hidden if self.is_gpt2 else 2 * self.hidden
        vectors = self.vocab * (2 - self.tied_head) + (self.seq + 2 if self.is_gpt2 else 1)
        return self.layers * (self.block_weights + others) + vectors * self.hidden

    @property
    def num_tokens(self) -> float:
        """The tokens of a step."""
        return self.num_micro_batches * self.micro_batch_size * self.num_batch_ranks * self.seq

    @property
    def flops(self) -> float:
        """The floating-point operations of a step, as the row's source counts them."""
        layers, width, seq, vocab = self.layers, self.hidden, self.seq, self.vocab
        in_products = layers * self.block_weights + width * vocab
        of_a_token = {
            "6Pm+12Lhs": 6 * in_products + 12 * layers * width * seq,
            "6Pm+6Lhs": 6 * in_products + 6 * layers * width * seq,
            "nanochat": 6 * in_products + 12 * width * _windows(layers, seq),
            "F96": 96 * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width)),
            "F72": 72 * layers * width**2 * (1 + seq / (12 * width) + vocab / (12 * layers * width)),
            "F72full": 72 * layers * width**2 * (1 + seq / (6 * width) + vocab / (12 * layers * width)),
            "8P": 8 * self.parameters,
            "6P": 6 * self.parameters,
            "6P+12Lhs": 6 * self.parameters + 12 * layers * width * seq,
        }
        return of_a_token.get(self.basis, of_a_token["6P+12Lhs"]) * self.num_tokens

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pipeline * self.data_size

    def tflops(self, seconds: float) -> float:
        return self.flops / seconds / self.num_ranks / 1e12

    def tokens_per_second(self, seconds: float) -> float:
        """Return the tokens that a GPU has in a second."""
        return self.num_tokens / seconds / self.num_ranks

    @property
    def is_offloaded(self) -> bool:
        """True if states were in host memory; activations that were are taken to cost no time."""
        return "offload" in self.notes.lower() and "offload" not in self.recompute_detail.lower()

    @property
    def shards_in_node(self) -> bool:
        """True if states are divided inside a node and replicated between nodes."""
        return "HSDP" in self.recompute_detail or "data parallel between" in self.optimizer

    @property
    def saves_products(self) -> bool:
        """True if each second product is recomputed, as by torchtitan's activation checkpointing of operations."""
        return "every second matmul" in self.recompute_detail

    @property
    def half_precision(self) -> str:
        return self.precision if self.precision in HALF else "bf16"


def is_fsdp(row: Row) -> bool:
    """Return True if the row's source measured PyTorch's FSDP."""
    return row.source.startswith(FSDP_SOURCES)


def _windows(layers: int, seq: int) -> float:
    """Return the sum of nanochat's attention windows: three of four layers have half of a sequence, the last all."""
    return sum(seq if layer % 4 == 3 or layer == layers - 1 else seq / 2 for layer in range(layers))


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the rows of a file. Raises ConfigError if it cannot be read, or with the line of a row that is wrong."""
    rows, reader = [], csv.DictReader(read_text(path, str(path)).splitlines())
    for values in reader:
        try:
            rows.append(Row.parse(values))
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    return rows
