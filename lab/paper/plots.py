"""Plots like the paper's, of the values that it prints and those of dry runs."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lab.pages.plots import plot
from lab.paper.experiments import PAPER


@dataclass(frozen=True)
class Series:
    """Values over names or over numbers (`places`). Unknown values are None; `marks` stand in their place in bars."""

    label: str
    places: Sequence[str | float]
    values: Sequence[float | None]
    style: str = "o-"
    color: str = "tab:blue"
    marks: Sequence[str] = ()


@contextmanager
def paper_plot(figure: str, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield the axes of docs/paper/FIGURE.png, and name them, with units."""
    with plot(PAPER / f"{figure}.png") as (axes,):
        yield axes
        axes.margins(y=0.15)  # room for the numbers above bars
        axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))


def plot_lines(labels: Sequence[str], series: Sequence[Series], names: Sequence[str] = ()) -> None:
    """Draw lines, with a gap at each unknown value. Names are drawn in the order of `names`, numbers to scale."""
    with paper_plot(*labels) as axes:
        for one in series:
            places = [names.index(str(place)) for place in one.places] if names else one.places
            values = [math.nan if value is None else value for value in one.values]
            axes.plot(places, values, one.style, color=one.color, alpha=0.8, label=one.label)
        if names:
            axes.set_xticks(range(len(names)), list(names))


def plot_bars(labels: Sequence[str], series: Sequence[Series], limit: tuple[str, float] | None = None) -> None:
    """Draw a group of bars for each name, and a line at `limit`. All series have the same names.

    An unknown value has no bar but its mark, if there is one.
    """
    names, width = series[0].places, 0.8 / len(series)
    with paper_plot(*labels) as axes:
        for number, one in enumerate(series):
            places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(names))]
            bars = axes.bar(places, [value or 0.0 for value in one.values], width, color=one.color, label=one.label)
            marks = one.marks or [""] * len(names)
            texts = [f"{value:.0f}" if value else mark for value, mark in zip(one.values, marks, strict=True)]
            axes.bar_label(bars, texts, padding=2, fontsize=8)
        if limit:
            axes.axhline(limit[1], color="tab:red", linestyle="--", label=limit[0])
        axes.set_xticks(range(len(names)), [str(name) for name in names])
