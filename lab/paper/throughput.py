"""The paper's figures of throughput, each as (status in a line, lines of the page), with its plot in docs/paper."""

import csv
import statistics
from collections.abc import Iterator, Sequence

from lab.pages.markdown import table
from lab.paper.experiments import CONFIGS, PAPER, Experiment, parsed
from lab.paper.plots import Series, plot_bars, plot_lines
from lab.paper.results import Part, Result, line_of, measured_here, results

EXCLUDED = "figure2/40b-baseline-384"  # reported separately: half the rate of its neighbours
THROUGHPUT = "figure2", "figure4", "figure8"


def predicted_rows(found: Sequence[Result]) -> list[Result]:
    """Return the rows with a printed value that the calibration has not used."""
    return [r for r in found if r.error is not None and not r.is_calibrated]


def errors_of(predicted: Sequence[Result]) -> str:
    worst = max(predicted, key=lambda r: abs(r.error or 0.0))
    median = statistics.median(abs(r.error or 0.0) for r in predicted)
    return f"the median error is {median:.0%}, the largest {abs(worst.error or 0.0):.0%} ({worst.experiment.name})"


def accuracy() -> Iterator[str]:
    """Yield sentences on the errors of the rows that were neither calibrated nor excluded, and on the excluded one."""
    predicted = [r for figure in THROUGHPUT for r in predicted_rows(results(figure))]
    others = [r for r in predicted if r.key != EXCLUDED]
    (excluded,) = (r for r in predicted if r.key == EXCLUDED)
    yield (
        f"Over {len(others)} of the {len(predicted)} predicted rows of Figures 2, 4 and 8 {errors_of(others)}. "
        f"One row is left out there, {EXCLUDED} with an error of {excluded.error:+.0%}: the paper's 40B baseline is "
        "slower than its 60B one, although it crosses fewer nodes."
    )


def throughput_table(found: Sequence[Result]) -> list[str]:
    rows = []
    for result in found:
        row, printed = result.experiment.row, result.experiment.row.get("tflops_per_gpu", "")
        system, batch = row.get("zero_config") or row.get("system"), row["batch_per_replica"]
        rate = "OOM" if result.tflops is None else f"{result.tflops:.1f}"
        error = f"{result.error:+.0%}" if result.error is not None else ""
        note = " (calibrated)" if result.is_calibrated else ""
        peak = f"{result.estimate.device_peak_bytes / 1e9:.1f}"
        figures = printed, rate, f"{error}{note}", peak, measured_here(result.experiment)
        rows.append([row["model"], system, row["gpus"], row["mp"], batch, *figures])
    figures = "paper, TFLOPs", "dry run", "error", "peak, GB", "on a cluster"
    return table(["model", "system", "GPUs", "TP", "batch", *figures], rows)


def size_of(name: str) -> float:
    """Return the billions of parameters in the name of a model, such as 1.16B."""
    return float(name.removesuffix("B"))


def against_size(figure: str, title: str) -> Part:
    """Return a figure whose x axis has the sizes of the models, with bars for each system."""
    found = results(figure)
    names = sorted({r.experiment.row["model"] for r in found}, key=size_of)
    series = []
    for system, colors in (("ZeRO", ("lightblue", "tab:blue")), ("baseline", ("navajowhite", "tab:orange"))):
        rows = {r.experiment.row["model"]: r for r in found if r.experiment.is_baseline is (system == "baseline")}
        printed = [rows[name].experiment.measured_tflops if name in rows else None for name in names]
        series.append(Series(f"{system}, paper", names, printed, color=colors[0]))
        rates = [rows[name].tflops if name in rows else None for name in names]
        series.append(Series(f"{system}, dry run", names, rates, color=colors[1]))
    lines, right = throughput_table(found), None
    if figure == "figure2":
        ratios = [_ratios(zero, baseline) for zero, baseline in zip(series[:2], series[2:], strict=True)]
        right = (
            "speed-up over the baseline",
            [
                Series("speed-up, paper", names, ratios[0], "x--", "tab:gray"),
                Series("speed-up, dry run", names, ratios[1], "o-", "black"),
            ],
        )
        cells = ([f"{ratio:.1f}" if ratio else "" for ratio in one] for one in ratios)
        named = ([name, *row] for name, row in zip(("paper", "dry run"), cells, strict=True))
        lines += ["", *table(["speed-up over the baseline", *names], named)]
    plot_bars((figure, title, "parameters of the model", "TFLOPs a GPU"), series, right=right)
    return throughput_status(found), lines


def _ratios(one: Series, other: Series) -> list[float | None]:
    return [a / b if a and b else None for a, b in zip(one.values, other.values, strict=True)]


def throughput_status(found: Sequence[Result]) -> str:
    predicted = predicted_rows(found)
    return f"off: over {len(predicted)} predicted of {len(found)} rows {errors_of(predicted)}"


def figure_3() -> Part:
    found = results("figure3")
    rates = [r.experiment.tflops(r.estimate.seconds) for r in found]
    gpus = [r.experiment.num_gpus for r in found]
    totals = [rate * num / 1e3 for rate, num in zip(rates, gpus, strict=True)]
    rows = []
    for r, num, rate, total in zip(found, gpus, rates, totals, strict=True):
        ratio = f"{total / totals[0]:.2f} (GPUs: {num / gpus[0]:.2f})"
        rows.append([num, r.experiment.row["batch_per_replica"], f"{rate:.1f}", f"{total:.2f}", ratio])
    lines = table(["GPUs", "batch of a replica", "TFLOPs a GPU", "total, PFLOPs", "times 64 GPUs"], rows)
    linear = [totals[0] * num / gpus[0] for num in gpus]
    series = [Series("dry run", gpus, totals), Series("in proportion to 64 GPUs", gpus, linear, "--", "tab:gray")]
    labels = "figure3", "Figure 3: 60B from 64 to 400 GPUs", "GPUs", "PFLOPs of all GPUs"
    plot_lines(labels, series, ("TFLOPs a GPU", [Series("a GPU", gpus, rates, "s:", "tab:orange")]))
    growth = f"from {gpus[0]} to {gpus[-1]} GPUs the total grows {totals[-1] / totals[0]:.2f} times"
    return f"{'right' if totals[-1] > linear[-1] else 'not reproduced'}: {growth}; the paper prints no values", lines


def turing_nlg() -> Result:
    """Return the dry run of Turing-NLG (section 10.6)."""
    settings = parsed(CONFIGS / "turing-nlg-17b.yaml", 256)
    model = settings.model
    row = {"model": "17B", "gpus": "256", "layers": str(model.num_layers), "hidden": str(model.hidden_size)}
    row |= {"total_batch": str(settings.train.global_batch_size), "tflops_per_gpu": "41.4"}
    return Result(Experiment("figure5", row), line_of(settings))


def figure_5() -> Part:
    """Return the figure of two small models in place of the paper's, and what a dry run says of Turing-NLG."""
    print("figure5", flush=True)
    with (PAPER / "fig5_perplexity.csv").open() as file:
        columns = list(zip(*csv.reader(file), strict=True))
    steps = [int(step) for step in columns[0][1:]]
    curves = [(column[0], [float(value) for value in column[1:]]) for column in columns[1:]]
    styles = ("-", "tab:orange"), ("-", "tab:blue")
    series = [Series(name, steps, values, *style) for (name, values), style in zip(curves, styles, strict=True)]
    plot_lines(("figure5", "Figure 5, with small models", "steps", "validation perplexity"), series)
    ends = " and ".join(f"{values[-1]:.1f} ({name})" for name, values in curves)
    result = turing_nlg()
    rate, peak = result.experiment.tflops(result.estimate.seconds), result.estimate.device_peak_bytes / 1e9
    line = (
        f"The perplexities end at {ends}.\n\n"
        f"A dry run of one of Turing-NLG's steps on 256 GPUs needs {peak:.1f} GB a GPU"
        f"{'' if result.fits else ' (out of memory)'} and reaches {rate:.1f} TFLOPs a GPU, where the paper prints "
        f"{result.experiment.measured_tflops} ({result.error:+.0%})."
    )
    return "not reproduced: the perplexity of Turing-NLG; two models of 1.7M and 3.4M parameters stand for it", [line]


def figure_8() -> Part:
    """Return the figure with bars, since a run that is out of memory has no rate: it has a mark instead."""
    found, title = results("figure8"), "Figure 8: throughput under C1 to C5"
    names = [f"{r.experiment.row['model']}\n{r.experiment.row['zero_config']}" for r in found]
    printed = [r.experiment.measured_tflops for r in found]
    paper_marks = ["OOM" if r.experiment.row["tflops_per_gpu"] == "OOM" else "" for r in found]
    marks = ["" if r.fits else "OOM" for r in found]
    series = [
        Series("paper", names, printed, color="tab:gray", marks=paper_marks),
        Series("dry run", names, [r.tflops for r in found], marks=marks),
    ]
    plot_bars(("figure8", title, "model and configuration", "TFLOPs a GPU"), series)
    num_equal = sum(one == other for one, other in zip(marks, paper_marks, strict=True))
    status = f"{throughput_status(found)}; {num_equal} of {len(found)} agree on what is out of memory"
    return status, throughput_table(found)
