"""The paper's figures of memory, each as (status in a line, lines of the page), with its plot in docs/paper."""

from lab.measure.cluster import RESERVED_BYTES
from lab.pages.markdown import table
from lab.paper.plots import Series, plot_bars
from lab.paper.results import CLUSTER, Part, residual_bytes, results
from zero.formulas.memory import formula
from zero.partition.stage import STAGES


def figure_1() -> Part:
    printed = "120, 31.4, 16.6 and 1.9 GB"
    found = [formula(policy, 7.5e9, 64).total / 1e9 for policy in STAGES.values()]
    computed = ", ".join(f"{gigabytes:.1f}" for gigabytes in found)
    status = f"closed form: model states of 7.5B on 64 GPUs take {computed} GB in stages 0 to 3; printed: {printed}"
    return status, [f"The {status}."]


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
    status = f"dry runs: {min(ratios):.2f} to {max(ratios):.2f} times the printed sizes, {agrees}in their order"
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
    return f"dry runs with a residual fitted to the first bar; the other printed bars within {worst:.0%}", lines
