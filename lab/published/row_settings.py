"""The settings of this project that a row of published throughputs stands for.

    python -m lab.published.row_settings      writes configs/published/ID.yaml, at each row's full depth and batch

What a row does not say follows from the program that was measured: `program_of`.
"""

import math
from typing import Any

import yaml

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.published.rows import FSDP_SOURCES, ROWS, Row, is_fsdp, read_rows

LARGEST_BUCKET = 500_000_000  # elements, of DeepSpeed by default
RECORDED_MICRO_BATCHES = 2  # the second one is like all that follow
SMALLEST_VOCAB_MULTIPLE, VOCAB_MULTIPLE = 8, 128
STORES = {"none": "none", "keep": "keep", "full": "keep", "selective": "selective", "local": "selective"}
OVERLAP_GATHERS = *FSDP_SOURCES, "DGX Cloud", "MLPerf", "NeMo", "Megatron-Bridge", "nanochat"  # of stages 1 and 2
GPUS_OF_A_NODE = 8


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
            "seq_length": row.seq // row.context_parallel,
            "vocab_size": row.vocab,
            "vocab_multiple": vocab_multiple(row),
            # torch's CPU kernels, by which a dry run imitates flash attention, have no dropout.
            "dropout": 0.0 if is_flash else row.dropout,
            "attention": "flash" if is_flash else "math",
            **_architecture(row),
        },
        "data": {"path": "runs/data/openwebtext"},
        "parallel": {
            "tensor_size": row.tp,
            "sequence_parallel": bool(row.sequence_parallel) and row.tp > 1,
            "tensor_across_nodes": True,
            **({"shard_size": GPUS_OF_A_NODE} if row.shards_in_node and row.data_size > GPUS_OF_A_NODE else {}),
        },
        "zero": _zero(row),
        "offload": {"mode": "host" if row.is_offloaded else "accelerator"},
        "activations": {"store": "keep" if row.saves_products else STORES.get(row.store, "keep")},
        "train": {
            "micro_batch_size": row.micro_batch_size,
            "global_batch_size": num_micro_batches * row.micro_batch_size * row.data_size,
            "precision": row.half_precision,
        },
    }


def _architecture(row: Row) -> dict[str, Any]:
    """Return the settings in which the model is no GPT-2. Squared ReLU is taken for GELU: both have two matrices."""
    if row.is_gpt2:
        return {}
    return {
        "mlp": "swiglu" if row.mlp_kind == "swiglu" else "gelu",
        "mlp_width": row.mlp_width,
        "num_kv_heads": row.kv_heads or row.heads,
        "norm": "rms" if row.norm == "rmsnorm" else "layer",
        "positions": "rope",
        "biases": False,
        "tied_head": bool(row.tied_head),
    }


def _zero(row: Row) -> dict[str, Any]:
    """Return the settings of ZeRO: buckets and overlap as the measured programs choose them.

    FSDP gathers and reduces a unit at a time, which is a block or the embedding, and DeepSpeed at most a certain number
    of elements. Megatron-LM's own data parallelism (stage 0) reduces all gradients at once, after backward. FSDP
    gathers the parameters of SHARD_GRAD_OP in the next forward, the others at the end of a step.
    """
    block = (row.block_weights + 13 * row.hidden) // row.tp
    embedding = math.ceil(row.vocab / row.tp + (row.seq if row.is_gpt2 else 0)) * row.hidden
    unit = max(block, embedding)
    largest = unit if is_fsdp(row) else LARGEST_BUCKET
    bucket_numel = {0: None, 1: min(block, largest), 2: min(block, largest)}.get(row.stage, min(unit, largest))
    return {
        "stage": row.stage,
        "bucket_numel": bucket_numel,
        "overlap": row.stage > 0,
        "overlap_gather": row.stage in (1, 2) and row.source.startswith(OVERLAP_GATHERS),
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


def padded_vocab(row: Row) -> int:
    return math.ceil(row.vocab / vocab_multiple(row)) * vocab_multiple(row)


def settings_of(tree: dict[str, Any], world_size: int) -> Settings:
    text = yaml.safe_dump(tree, default_flow_style=True)
    return parse_settings(["--config", text, f"--dry_run.world_size={world_size}"])


def configuration(row: Row) -> str:
    """Return the file of a row, which trains once `data.path` names a data set."""
    tree = settings_tree(row) | {"run": {"dir": f"runs/published/{row.id}"}}
    title = f"# {row.source}: {row.published_tflops:g} TFLOPs a GPU ({row.basis}) on {row.gpus} {row.gpu}\n"
    return title + yaml.safe_dump(tree, sort_keys=False)


if __name__ == "__main__":
    for row in read_rows():
        (ROWS.parent / f"{row.id}.yaml").write_text(configuration(row))
