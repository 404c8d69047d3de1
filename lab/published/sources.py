"""The programs and clusters of the sources, and the effects of a projection: sources.yaml has them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from lab.dryrun.costs.program import Program
from lab.measure.cluster import ClusterSpec
from lab.published.rows import Row

FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
EFFECTS: dict[str, dict[str, Any]] = FOUND["effects"]


def program_of(row: Row) -> Program:
    """Return the program that a row's source measured; an unknown one is this one."""
    return next((Program(**own) for name, own in FOUND["programs"].items() if row.source.startswith(name)), Program())


def cluster_name(row: Row) -> str:
    by_gpu = (name for gpu, name in FOUND["clusters_by_gpu"].items() if row.gpu.startswith(gpu))
    return FOUND["clusters"].get(row.cluster) or next(by_gpu, "dgx-a100")


def gpu_type(row: Row) -> str:
    """Return the type of GPU whose fitted constants a row's cluster has."""
    return FOUND["fitted_types"].get(cluster_name(row), "A100")


def without(effect: str, cluster: ClusterSpec, program: Program) -> tuple[ClusterSpec, Program]:
    of_program = EFFECTS[effect].keys() & {field.name for field in fields(Program)}
    values = EFFECTS[effect]
    cluster = replace(cluster, **{name: values[name] for name in values.keys() - of_program})
    return cluster, replace(program, **{name: values[name] for name in of_program})
