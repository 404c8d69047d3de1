"""Plots of the losses of one run or of several, over tokens."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # works without a display

from matplotlib import pyplot

from gpt.monitor.units import count

WIDEST, NARROWEST = 4.0, 1.0  # lines, in points


def plot_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the training losses of several runs, given as {name: logged steps}, to an image file.

    Each line is narrower than those below it, so equal losses show as stripes.
    """
    figure, axes = _axes(f"Training loss of {len(runs)} runs")
    for number, (name, records) in enumerate(runs.items()):
        width = WIDEST - (WIDEST - NARROWEST) * number / max(1, len(runs) - 1)
        axes.plot([r["tokens"] for r in records], [r["loss"] for r in records], label=name, linewidth=width)
    _save(figure, axes, path)


def plot_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Plot the training and the validation loss of the run in the image file's folder."""
    figure, axes = _axes(f"Loss of {path.absolute().parent.name}")
    training = [(record["tokens"], record["loss"]) for record in records]
    axes.plot(*zip(*training, strict=True), label="training", linewidth=1)
    validation = [(record["tokens"], record["validation_loss"]) for record in records if "validation_loss" in record]
    if validation:
        axes.plot(*zip(*validation, strict=True), label="validation", marker="o", markersize=3)
    _save(figure, axes, path)


def _axes(title: str) -> tuple[Any, Any]:
    """Return a figure and its axes: tokens, written as 500K or 1.5M, and the loss."""
    margins = {"left": 0.1, "right": 0.98, "top": 0.93}  # fixed: a layout that is computed takes as long as the drawing
    figure, axes = pyplot.subplots(figsize=(8, 4.5), gridspec_kw=margins)
    axes.set(title=title, xlabel="training tokens", ylabel="loss, nats per token")
    axes.xaxis.set_major_formatter(lambda tokens, _: count(tokens))
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
