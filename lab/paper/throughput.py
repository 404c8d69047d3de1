"""The paper's figures of throughput, each as (status in a line, lines of the page), with its plot in docs/paper."""

import statistics
from collections.abc import Iterator, Sequence

from lab.pages.markdown import table
from lab.paper.experiments import CONFIGS, Experiment, parsed
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
    """Return a figure whose x axis has the sizes of the models, and a line for each system."""
    found = results(figure)
    names = sorted({r.experiment.row["model"] for r in found}, key=size_of)
    series = []
    for system, color in (("ZeRO", "tab:blue"), ("baseline", "tab:orange")):
        rows = [r for r in found if r.experiment.is_baseline is (system == "baseline")]
        rows.sort(key=lambda r: size_of(r.experiment.row["model"]))
        places, printed = [r.experiment.row["model"] for r in rows], [r.experiment.measured_tflops for r in rows]
        series.append(Series(f"{system}, dry run", places, [r.tflops for r in rows], "o-", color))
        series.append(Series(f"{system}, paper", places, printed, "x--", color))
    plot_lines((figure, title, "parameters of the model", "TFLOPs a GPU"), series, names)
    return throughput_status(found), throughput_table(found)


def throughput_status(found: Sequence[Result]) -> str:
    predicted = predicted_rows(found)
    return f"dry runs; over {len(predicted)} predicted of {len(found)} rows {errors_of(predicted)}"


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
    plot_lines(("figure3", "Figure 3: 60B, all GPUs together", "GPUs", "PFLOPs of all GPUs"), series)
    growth = f"from {gpus[0]} to {gpus[-1]} GPUs the total grows {totals[-1] / totals[0]:.2f} times"
    return f"dry runs, a pure prediction: {growth}; the paper prints no values", lines


def figure_5() -> Part:
    """Return what a dry run says of Turing-NLG, whose training is not repeated."""
    settings, printed = parsed(CONFIGS / "turing-nlg-17b.yaml", 256), 41.4
    model = settings.model
    row = {"model": "17B", "gpus": "256", "layers": str(model.num_layers), "hidden": str(model.hidden_size)}
    row["total_batch"] = str(settings.train.global_batch_size)
    print("figure5", flush=True)
    result = Result(Experiment("figure5", row), line_of(settings))
    rate, peak = result.experiment.tflops(result.estimate.seconds), result.estimate.device_peak_bytes / 1e9
    line = (
        f"A dry run of one of its steps on 256 GPUs needs {peak:.1f} GB a GPU"
        f"{'' if result.fits else ' (out of memory)'} and reaches {rate:.1f} TFLOPs a GPU, where the paper prints "
        f"{printed} ({rate / printed - 1:+.0%})."
    )
    status = f"perplexity not reproduced; dry run of Turing-NLG: {rate:.1f} TFLOPs a GPU, printed: {printed}"
    return status, [line]


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
    status = f"{throughput_status(found)}; {num_equal} of {len(found)} rows agree on what is out of memory"
    return status, throughput_table(found)
