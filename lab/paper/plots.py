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


OtherScale = tuple[str, Sequence[Series]]  # the label of a second scale, at the right, and its lines


@contextmanager
def paper_plot(figure: str, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield the axes of docs/paper/FIGURE.png, and name them, with units."""
    with plot(PAPER / f"{figure}.png") as (axes,):
        yield axes
        axes.margins(y=0.15)  # room for the numbers above bars
        axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, None))


def plot_lines(
    labels: Sequence[str], series: Sequence[Series], right: tuple[str, Sequence[Series]] | None = None
) -> None:
    """Draw lines over numbers, with a gap at each unknown value."""
    with paper_plot(*labels) as axes:
        for one in series:
            _draw_line(axes, one, one.places)
        if right:
            _draw_on_the_right(axes, *right, series[0].places)


def plot_bars(
    labels: Sequence[str],
    series: Sequence[Series],
    limit: tuple[str, float] | None = None,
    right: OtherScale | None = None,
    is_stacked: bool = False,
) -> None:
    """Draw a group of bars for each name, or one bar of all series, and a line at `limit`. All have the same names.

    An unknown value has no bar but its mark, if there is one.
    """
    names, width = series[0].places, 0.8 / (1 if is_stacked else len(series))
    below = [0.0] * len(names)
    with paper_plot(*labels) as axes:
        for number, one in enumerate(series):
            shift = 0 if is_stacked else (number - (len(series) - 1) / 2) * width
            heights = [value or 0.0 for value in one.values]
            places = [place + shift for place in range(len(names))]
            bars = axes.bar(places, heights, width, bottom=below, color=one.color, label=one.label)
            marks = one.marks or [""] * len(names)
            texts = [f"{value:.0f}" if value else mark for value, mark in zip(one.values, marks, strict=True)]
            if is_stacked:
                below = [a + b for a, b in zip(below, heights, strict=True)]
                texts = [f"{total:.1f}" if one is series[-1] else "" for total in below]
            axes.bar_label(bars, texts, padding=2, fontsize=8 if len(names) * len(series) < 40 else 6)
        if limit:
            axes.axhline(limit[1], color="tab:red", linestyle="--", label=limit[0])
        axes.set_xticks(range(len(names)), [str(name) for name in names])
        if right:
            _draw_on_the_right(axes, *right, range(len(names)))


def _draw_on_the_right(axes: Any, label: str, series: Sequence[Series], places: Sequence[Any]) -> None:
    scale = axes.twinx()
    for one in series:
        _draw_line(scale, one, places)
    scale.set(ylabel=label, ylim=(0, 1.25 * scale.get_ylim()[1]))  # room for the legends
    axes.set(ylim=(0, 1.25 * axes.get_ylim()[1]))
    axes.legend(loc="upper left", fontsize=8)
    scale.legend(loc="upper right", fontsize=8)


def _draw_line(axes: Any, series: Series, places: Sequence[Any]) -> None:
    values = [math.nan if value is None else value for value in series.values]
    axes.plot(places, values, series.style, color=series.color, alpha=0.8, label=series.label)
