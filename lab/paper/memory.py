"""The paper's tables and figures of memory, each as (status, lines of the page); figures have a plot in docs/paper."""

import csv
from itertools import product

from gpt.settings.settings import Settings
from lab.measure.cluster import RESERVED_BYTES
from lab.pages.markdown import table
from lab.paper.experiments import CONFIGS, PAPER, parsed
from lab.paper.plots import Series, plot_bars
from lab.paper.results import CLUSTER, Part, line_of, residual_bytes, results
from zero.core.partition.stage import STAGES, ShardingPolicy
from zero.formulas.memory import formula

UNUSED_GB = 8.0  # memory that the measured models of Table 2 leave unused


def rows_of(file_name: str) -> list[dict[str, str]]:
    with (PAPER / file_name).open() as file:
        return list(csv.DictReader(file))


STAGE_NUMBERS = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}


def table_1() -> Part:
    rows = rows_of("table1_memory_gb.csv")
    sizes = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
    num_equal, cells = 0, {}
    for row in rows:
        policy = STAGES[STAGE_NUMBERS[row["stage"]]]
        found = formula(policy, sizes[row["model"]], int(row["dp"])).total / 1e9
        digits = len(row["paper_GB"].partition(".")[2])
        truncated = int(found * 10**digits) / 10**digits
        num_equal += float(row["paper_GB"]) in (round(found + 1e-9, digits), truncated)
        cells[row["dp"], row["model"], row["stage"]] = f"{row['paper_GB']} / {found:.6g}"
    columns = list(product(sizes, STAGE_NUMBERS))
    lines = table(
        ["DP", *(f"{model}, {stage}" for model, stage in columns)],
        [[size, *(cells[size, *column] for column in columns)] for size in dict.fromkeys(row["dp"] for row in rows)],
    )
    count = f"{num_equal} of {len(rows)} cells equal the closed form"
    lines.append(f"\nGB, paper / closed form. {count} (1T and some 128B cells are truncated there).")
    return f"{'right' if num_equal == len(rows) else 'off'}: {count}", lines


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
        printed = (row[f"{name}_B_paper"] for name in ("baseline", "Pos", "Posg", "Posgp"))
        theory = [
            f"{cell} / {largest_model(policy, 32e9, data_size, tensor_size) / 1e9:.1f}"
            for cell, policy in zip(printed, STAGES.values(), strict=True)
        ]
        cells = []
        for stage, column in ((0, "measured_baseline_B"), (1, "measured_Pos_B")):
            print(f"table 2, tensor size {tensor_size}, stage {stage}", flush=True)
            line = line_of(table_2_settings(tensor_size, data_size, stage))
            parameters = line.at(line.max_layers(CLUSTER.gpu_memory_bytes - UNUSED_GB * 1e9)).parameters / 1e9
            errors.append(parameters / float(row[column]) - 1)
            cells += [row[column], f"{parameters:.2f} ({errors[-1]:+.0%})"]
        rows.append([tensor_size, *theory, *cells])
    headings = ["TP", "theory: baseline", "Pos", "Pos+g", "Pos+g+p", "baseline, measured", "dry run", "Pos, measured"]
    status = (
        "theory right: the paper doubles the rounded cells of TP 1; measured models off by up to "
        f"{max(map(abs, errors)):.0%}, by dry runs that leave {UNUSED_GB:.0f} GB free"
    )
    return status, [*table([*headings, "dry run"], rows), "\nTheory: paper / closed form, in billions."]


def table_2_settings(tensor_size: int, data_size: int, stage: int) -> Settings:
    options = {
        "model.hidden_size": {1: 1920, 2: 3072, 4: 4096, 8: 6144, 16: 8192}[tensor_size],
        "parallel.tensor_size": tensor_size,
        "zero.stage": stage,
        "zero.bucket_numel": "null" if stage == 0 else 2**25,
        "train.global_batch_size": data_size,
    }
    words = (f"--{name}={value}" for name, value in options.items())
    return parsed(CONFIGS / "table2.yaml", tensor_size * data_size, *words)


def figure_1() -> Part:
    names, printed = ["baseline", *STAGE_NUMBERS], (120, 31.4, 16.6, 1.9)
    found = [formula(policy, 7.5e9, 64) for policy in STAGES.values()]
    kinds = {
        "parameters": [one.parameters / 1e9 for one in found],
        "gradients": [one.gradients / 1e9 for one in found],
        "optimizer states": [(one.master + one.moments) / 1e9 for one in found],
    }
    colors = "tab:blue", "tab:orange", "tab:green"
    series = [Series(kind, names, values, color=c) for (kind, values), c in zip(kinds.items(), colors, strict=True)]
    labels = "figure1", "Figure 1: model states of 7.5B on 64 GPUs", "what is divided", "GB a GPU"
    plot_bars(labels, series, is_stacked=True)
    totals = [f"{one.total / 1e9:.1f}" for one in found]
    are_equal = [float(total) for total in totals] == list(printed)
    parts = ([f"{value:.2f}" for value in values] for values in kinds.values())
    status = f"{'right' if are_equal else 'off'}: the closed form gives {', '.join(totals)} GB"
    return status, table(["", "paper, GB", "closed form", *kinds], zip(names, printed, totals, *parts, strict=True))


def figure_6() -> Part:
    found, title, rows = results("figure6"), "Figure 6: the largest model", []
    rooms = {
        "dry run, with Figure 7's residual": CLUSTER.gpu_memory_bytes - residual_bytes(),
        "dry run, with the reserve": CLUSTER.usable_gpu_bytes,
    }
    sizes: dict[str, list[float]] = {name: [] for name in rooms}
    for r in found:
        cells = []
        for name, room in rooms.items():
            layers = r.line.max_layers(room)
            sizes[name].append(r.line.at(layers).parameters / 1e9)
            cells.append(f"{sizes[name][-1]:.0f}B ({layers} layers)")
        row = r.experiment.row
        rows.append([row["zero_config"], f"{row['max_model_B']}B", *cells])
    names = [r.experiment.row["zero_config"] for r in found]
    printed = [float(r.experiment.row["max_model_B"]) for r in found]
    series = [Series("paper", names, printed, color="tab:gray")]
    series += [Series(n, names, sizes[n], color=c) for n, c in zip(rooms, ("tab:blue", "tab:cyan"), strict=True)]
    plot_bars(("figure6", title, "configuration", "billions of parameters"), series)
    orders = [[name for _, name in sorted(zip(values, names, strict=True))] for values in (printed, *sizes.values())]
    agrees = "" if all(order == orders[0] for order in orders) else "not "
    lines = table(["config", "paper", *rooms], rows)
    lines.append(f"\nThe order is {agrees}the paper's: {', '.join(orders[0])}.")
    ratios = [size / known for of_room in sizes.values() for size, known in zip(of_room, printed, strict=True)]
    status = (
        f"order {'right' if not agrees else 'not reproduced'}; sizes off: dry runs give {min(ratios):.2f} to "
        f"{max(ratios):.2f} times the printed ones"
    )
    return status, lines


def figure_7() -> Part:
    found, residual, title = results("figure7"), residual_bytes(), "Figure 7: largest memory cached"
    limit = CLUSTER.gpu_memory_bytes / 1e9
    rows, totals, errors, above = [], [], [], []
    for r in found:
        row, peak, printed = r.experiment.row, r.estimate.device_peak_bytes, r.experiment.row["max_cached_GB"]
        totals.append((peak + residual) / 1e9)
        if printed:
            errors.append(totals[-1] / float(printed) - 1)
        if totals[-1] > limit:
            above.append(f"{row['model']} {row['zero_config']}")
        error = f"{errors[-1]:+.0%}" if printed else "predicted"
        rows.append([row["model"], row["zero_config"], printed, f"{peak / 1e9:.2f}", f"{totals[-1]:.2f}", error])
    names = [f"{r.experiment.row['model']}\n{r.experiment.row['zero_config']}" for r in found]
    printed_gb = [float(r.experiment.row["max_cached_GB"] or 0) or None for r in found]
    series = [Series("paper", names, printed_gb, color="tab:gray"), Series("dry run and residual", names, totals)]
    labels = "figure7", title, "model and configuration", "GB a GPU"
    plot_bars(labels, series, (f"memory of a GPU, {limit:.1f} GB", limit))
    lines = [f"A residual of {residual / 1e9:.2f} GB, fitted on C1 at 40B, is added to every bar.\n"]
    lines += table(["model", "config", "paper, GB", "dry run", "with the residual", "error"], rows)
    if above:
        lines.append(
            f"\nThe bars of {' and '.join(above)} stand above the memory of a GPU. Figure 2 asks if the peak and the "
            f"reserve of {RESERVED_BYTES / 1e9:.0f} GB fit."
        )
    worst = max(map(abs, errors))
    return f"off by up to {worst:.0%}: dry runs with a residual that is fitted to the first bar", lines
