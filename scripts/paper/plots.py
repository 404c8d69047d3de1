"""Plots like the paper's, of the values that it prints and those of dry runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes


@dataclass(frozen=True)
class Series:
    """Values over names or over numbers (`places`). Unknown values are None."""

    label: str
    places: Sequence[str | float]
    values: Sequence[float | None]
    style: str = "o-"
    color: str = "tab:blue"


def plot_lines(path: Path, title: str, axis_labels: tuple[str, str], series: Sequence[Series]) -> None:
    _, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for one in series:
        known = [(x, value) for x, value in zip(one.places, one.values, strict=True) if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), one.style, color=one.color, alpha=0.8, label=one.label)
    axes.set_xlabel(axis_labels[0])
    finish(path, title, axis_labels[1], axes)


def plot_bars(path: Path, title: str, unit: str, series: Sequence[Series]) -> None:
    """Draw a group of bars for each name. All series have the same names."""
    _, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    names, width = series[0].places, 0.8 / len(series)
    for number, one in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
        bars = axes.bar(places, [value or 0.0 for value in one.values], width, color=one.color, label=one.label)
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in one.values], fontsize=8)
    axes.set_xticks(range(len(names)), [str(name) for name in names])
    finish(path, title, unit, axes)


def finish(path: Path, title: str, unit: str, axes: Axes) -> None:
    axes.set(ylabel=unit, title=title, ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    pyplot.savefig(path, dpi=100)
    pyplot.close()
