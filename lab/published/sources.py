"""The programs and clusters of the sources, and the effects of a projection: sources.yaml has them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from lab.dryrun.costs.program import Program
from lab.dryrun.costs.quantized import Quantization
from lab.measure.cluster import ClusterSpec
from lab.measure.recipes import RECIPES
from lab.published.row_settings import padded_vocab
from lab.published.rows import Row

FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
# FlashAttention-3 reaches 1.2 PFLOPs in FP8 and 0.74 in FP16 on an H100 (its abstract).
FP8_ATTENTION = 1.6
GPUS_OF_A_TRAY: dict[str, int] = FOUND["gpus_of_a_tray"]
EFFECTS: dict[str, dict[str, Any]] = FOUND["effects"]


def program_of(row: Row) -> Program:
    """Return the program that a row's source measured; an unknown one is this one."""
    programs: dict[str, dict[str, Any]] = FOUND["programs"]
    own = next((own for name, own in programs.items() if row.source.startswith(name)), {})
    of_row = {
        "merges_elementwise": bool(row.compiled),
        "merges_copies": bool(row.compiled),
        "overlaps_tensor": bool(row.async_tp),
        "is_captured": bool(row.cuda_graph),
        "saves_products": row.saves_products,
    }
    program = Program(**({name: True for name, applies in of_row.items() if applies} | own))
    return replace(
        program, attention_gain=program.attention_gain * (FP8_ATTENTION if "FP8 attention" in row.notes else 1)
    )


def quantization_of(row: Row) -> Quantization | None:
    """Return how the products of a row are quantized, None if they are not."""
    recipe = row.gemm_precision.removeprefix("fp8-")
    if recipe not in RECIPES:
        return None
    if recipe == "tensorwise" and (row.source.startswith(tuple(FOUND["delayed"])) or "delayed" in row.notes):
        recipe = "delayed"
    tokens = row.micro_batch_size * row.seq // row.context_parallel
    head = 0 if row.source.startswith(tuple(FOUND["quantize_head"])) else padded_vocab(row) // row.tp
    is_once_a_step = row.fp8_gather or row.stage < 3
    return Quantization(recipe, tokens, head, bool(is_once_a_step), bool(row.compiled))


def cluster_name(row: Row) -> str:
    names = FOUND["late_clusters_by_gpu" if row.gemm_precision else "clusters_by_gpu"]
    by_gpu = (name for gpu, name in names.items() if row.gpu.startswith(gpu))
    return FOUND["clusters"].get(row.cluster) or next(by_gpu, "dgx-a100")


def gpu_type(row: Row) -> str:
    """Return the type of GPU whose fitted constants a row's cluster has."""
    return FOUND["fitted_types"].get(cluster_name(row), "A100")


def without(effect: str, cluster: ClusterSpec, program: Program) -> tuple[ClusterSpec, Program]:
    of_program = EFFECTS[effect].keys() & {field.name for field in fields(Program)}
    values = EFFECTS[effect]
    cluster = replace(cluster, **{name: values[name] for name in values.keys() - of_program})
    return cluster, replace(program, **{name: values[name] for name in of_program})
