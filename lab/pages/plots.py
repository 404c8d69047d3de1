"""Plots of curves and of bars, written to files without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # of a legend: at the right of the plot


@contextmanager
def plot(path: Path, num_panels: int = 1, size: tuple[float, float] = (9, 4.5), **options: Any) -> Iterator[list[Any]]:
    """Yield the axes of a figure's panels, which stand side by side, and write the figure at the end of the block.

    `options` are those of `Figure.subplots`. Panels get a grid, and a legend if something in them has a label.
    """
    figure = Figure(size, layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False, **options)[0].tolist()
    yield panels
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend()
    figure.savefig(path, dpi=120)
