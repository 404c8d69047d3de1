"""The rows of published throughputs, and the configuration of this project that each one stands for.

A row is one published run (the columns are explained in docs/published/README.md). What a row does not say follows from
the program that was measured: `program_of`.
"""

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from parallel.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "configs/published/rows.csv"
LARGEST_BUCKET = 500_000_000  # elements, of DeepSpeed by default
RECORDED_MICRO_BATCHES = 2  # the second one is like all that follow
SMALLEST_VOCAB_MULTIPLE, VOCAB_MULTIPLE = 8, 128
STORES = {"none": "none", "keep": "keep", "full": "keep", "selective": "selective", "local": "selective"}
HALF = "fp16", "bf16"
FSDP_SOURCES = "MosaicML", "PyTorch FSDP"


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

    def __post_init__(self) -> None:
        if min(self.gpus, self.layers, self.hidden, self.heads, self.seq, self.tp, self.micro, self.global_batch) < 1:
            raise ConfigError(f"row {self.id} has a size below 1; correct it")

    @classmethod
    def parse(cls, values: dict[str, str]) -> Self:
        """Return the row of a line of a CSV file. Unknown columns are left out, and empty ones have their default."""
        known = {field.name: field.type for field in fields(cls)}
        types: dict[Any, Any] = {int: lambda text: round(float(text)), float: float, str: str}
        found = {name: types[kind](values[name]) for name, kind in known.items() if values.get(name)}
        return cls(**found)

    @property
    def data_size(self) -> int:
        return max(1, self.gpus // self.tp)

    @property
    def micro_batch_size(self) -> int:
        """The sequences of a micro-batch; all that a GPU has in a step if these are fewer than published."""
        return max(1, min(self.micro, self.global_batch // self.data_size))

    @property
    def num_micro_batches(self) -> float:
        """The micro-batches of a step; the last one may be a part of one."""
        return max(1.0, self.global_batch / self.data_size / self.micro_batch_size)

    @property
    def parameters(self) -> int:
        """The parameters of a GPT-2 of the row's shape."""
        return self.layers * (12 * self.hidden + 13) * self.hidden + (self.vocab + self.seq + 2) * self.hidden

    @property
    def flops(self) -> float:
        """The floating-point operations of a step, as the row's source counts them."""
        layers, width, seq, vocab = self.layers, self.hidden, self.seq, self.vocab
        tokens = self.num_micro_batches * self.micro_batch_size * self.data_size * seq
        of_a_token = {
            "F96": 96 * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width)),
            "F72": 72 * layers * width**2 * (1 + seq / (12 * width) + vocab / (12 * layers * width)),
            "F72full": 72 * layers * width**2 * (1 + seq / (6 * width) + vocab / (12 * layers * width)),
            "8P": 8 * self.parameters,
            "6P": 6 * self.parameters,
            "6P+12Lhs": 6 * self.parameters + 12 * layers * width * seq,
        }
        return of_a_token.get(self.basis, of_a_token["6P+12Lhs"]) * tokens

    def tflops(self, seconds: float) -> float:
        return self.flops / seconds / (self.tp * self.data_size) / 1e12

    @property
    def is_offloaded(self) -> bool:
        return "offload" in self.notes.lower()

    @property
    def reduced_type(self) -> str:
        """The type in which gradients are reduced: fp32, or the half precision of the parameters."""
        return "fp32" if self.reduce_dtype == "fp32" else self.half_precision

    @property
    def half_precision(self) -> str:
        return self.precision if self.precision in HALF else "bf16"


def is_fsdp(row: Row) -> bool:
    """Return True if the row's source measured PyTorch's FSDP."""
    return row.source.startswith(FSDP_SOURCES)


def read_rows(path: Path = ROWS) -> list[Row]:
    with path.open() as file:
        return [Row.parse(line) for line in csv.DictReader(file)]


def recorded_micro_batches(row: Row) -> int:
    return min(RECORDED_MICRO_BATCHES, math.ceil(row.num_micro_batches))


def settings_tree(row: Row, num_micro_batches: int | None = None) -> dict[str, Any]:
    """Return the settings of the row's run, by default with all of its micro-batches."""
    num_micro_batches = num_micro_batches or round(row.num_micro_batches)
    is_flash = row.attention != "math"
    return {
        "model": {
            "num_layers": row.layers,
            "hidden_size": row.hidden,
            "num_heads": num_heads(row),
            "seq_length": row.seq,
            "vocab_size": row.vocab,
            "vocab_multiple": vocab_multiple(row),
            # torch's CPU kernels, by which a dry run imitates flash attention, have no dropout.
            "dropout": 0.0 if is_flash else row.dropout,
            "attention": "flash" if is_flash else "math",
        },
        "data": {"path": "runs/data/openwebtext"},
        "parallel": {
            "tensor_size": row.tp,
            "sequence_parallel": bool(row.sequence_parallel) and row.tp > 1,
            "tensor_across_nodes": True,
        },
        "zero": _zero(row),
        "offload": {"mode": "host" if row.is_offloaded else "accelerator"},
        "activations": {"store": STORES.get(row.store, "keep")},
        "train": {
            "micro_batch_size": row.micro_batch_size,
            "global_batch_size": num_micro_batches * row.micro_batch_size * row.data_size,
            "precision": row.half_precision,
        },
    }


def _zero(row: Row) -> dict[str, Any]:
    """Return the settings of ZeRO: buckets and overlap as the measured programs choose them.

    FSDP gathers and reduces a unit at a time, which is a block or the embedding, and DeepSpeed at most a certain number
    of elements. Megatron-LM's own data parallelism (stage 0) reduces all gradients at once, after backward. FSDP
    gathers the parameters of SHARD_GRAD_OP in the next forward, the others at the end of a step.
    """
    block = (12 * row.hidden + 13) * row.hidden // row.tp
    embedding = math.ceil(row.vocab / row.tp + row.seq) * row.hidden
    unit = max(block, embedding)
    largest = unit if is_fsdp(row) else LARGEST_BUCKET
    bucket_numel = {0: None, 1: min(block, largest), 2: min(block, largest)}.get(row.stage, min(unit, largest))
    return {
        "stage": row.stage,
        "bucket_numel": bucket_numel,
        "overlap": row.stage > 0,
        "overlap_gather": row.stage in (1, 2) and is_fsdp(row),
        "reduce_dtype": row.reduced_type,
    }


def num_heads(row: Row) -> int:
    """Return the number of heads, or the one next to it that divides the hidden size and that the tensor size divides.

    A shape that is published with rounded numbers would have no dry run otherwise.
    """
    possible = [n for n in range(row.tp, row.hidden + 1, row.tp) if row.hidden % n == 0]
    return min(possible, key=lambda n: abs(n - row.heads), default=row.heads)


def vocab_multiple(row: Row) -> int:
    """Return the number to whose multiple the vocabulary is rounded up: a divisor of it, if it was padded before."""
    divisor = math.gcd(row.vocab, VOCAB_MULTIPLE)
    return math.lcm(row.tp, divisor if divisor >= SMALLEST_VOCAB_MULTIPLE else VOCAB_MULTIPLE)


def settings_of(tree: dict[str, Any], world_size: int) -> Settings:
    text = yaml.safe_dump(tree, default_flow_style=True)
    return parse_settings(["--config", text, f"--dry_run.world_size={world_size}"])
