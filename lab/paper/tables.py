"""The paper's tables: the closed forms of Tables 1 and 2, and the deepest models of Table 2 by dry runs."""

import csv

from lab.pages.markdown import table
from lab.paper.experiments import GRADIENT_TYPES, OF_THE_PAPER, PAPER
from lab.paper.results import CLUSTER, Part, line_of
from zero.formulas.memory import formula
from zero.partition.stage import STAGES, ShardingPolicy

UNUSED_GB = 8.0  # memory that the measured models of Table 2 leave unused


def rows_of(file_name: str) -> list[dict[str, str]]:
    with (PAPER / file_name).open() as file:
        return list(csv.DictReader(file))


def table_1() -> Part:
    rows = rows_of("table1_memory_gb.csv")
    sizes = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
    stages = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
    num_equal = 0
    for row in rows:
        found = formula(STAGES[stages[row["stage"]]], sizes[row["model"]], int(row["dp"])).total / 1e9
        digits = len(row["paper_GB"].partition(".")[2])
        truncated = int(found * 10**digits) / 10**digits
        num_equal += float(row["paper_GB"]) in (round(found + 1e-9, digits), truncated)
    status = f"{num_equal} of {len(rows)} cells equal the closed form"
    return status, [f"{status} (1T and some 128B cells are truncated there)."]


def largest_model(policy: ShardingPolicy, memory_bytes: float, N_d: int, N_m: int = 1) -> float:
    """Return the number of parameters whose model states alone fill `memory_bytes` on every rank (section 5, Table 2).

    `N_d` and `N_m` are the numbers of data-parallel and of model-parallel ranks.
    """
    return N_m * memory_bytes / formula(policy, 1.0, N_d).total


def table_2() -> Part:
    """Return the status of Table 2, and its lines.

    The columns of dry runs are the deepest models that leave UNUSED_GB free with one sequence a rank.
    """
    rows, errors = [], []
    for row in rows_of("table2_max_model_billion.csv"):
        tensor_size, data_size = int(row["mp"]), int(row["dp"])
        theory = [f"{largest_model(STAGES[s], 32e9, data_size, tensor_size) / 1e9:.1f}" for s in STAGES]
        cells = []
        for stage, column in ((0, "measured_baseline_B"), (1, "measured_Pos_B")):
            print(f"table 2, tensor size {tensor_size}, stage {stage}", flush=True)
            line = line_of(table_2_settings(tensor_size, data_size, stage), tensor_size * data_size)
            parameters = line.at(line.max_layers(CLUSTER.gpu_memory_bytes - UNUSED_GB * 1e9)).parameters / 1e9
            errors.append(parameters / float(row[column]) - 1)
            cells += [row[column], f"{parameters:.2f} ({errors[-1]:+.0%})"]
        rows.append([tensor_size, *theory, *cells])
    headings = ["TP", "theory: baseline", "Pos", "Pos+g", "Pos+g+p", "baseline, measured", "dry run", "Pos, measured"]
    status = (
        "theory by the closed form; measured models by dry runs that leave "
        f"{UNUSED_GB:.0f} GB free, within {max(map(abs, errors)):.0%}"
    )
    return status, table([*headings, "dry run"], rows)


def table_2_settings(tensor_size: int, data_size: int, stage: int) -> dict:
    hidden_size = {1: 1920, 2: 3072, 4: 4096, 8: 6144, 16: 8192}[tensor_size]
    return {
        "model": {"num_layers": 24, "hidden_size": hidden_size, "num_heads": 32, **OF_THE_PAPER, "attention": "math"},
        "data": {"path": "runs/data/openwebtext"},
        "parallel": {"tensor_size": tensor_size},
        "zero": {"stage": stage, "bucket_numel": None if stage == 0 else 2**25, **GRADIENT_TYPES},
        "activations": {"store": "keep", "layers_per_checkpoint": 2},
        "train": {"micro_batch_size": 1, "global_batch_size": data_size, "precision": "fp16"},
    }
