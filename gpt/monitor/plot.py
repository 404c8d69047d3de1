"""Plots of the losses of one run or of several, over tokens."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # works without a display

from matplotlib import pyplot


def plot_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the training losses of several runs, given as {name: logged steps}, to an image file."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, records in runs.items():
        axes.plot([r["tokens"] for r in records], [r["loss"] for r in records], label=name, linewidth=1)
    _save(figure, axes, path)


def plot_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Plot the training and the validation loss of one run to an image file."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    training = [(record["tokens"], record["loss"]) for record in records]
    axes.plot(*zip(*training, strict=True), label="training", linewidth=1)
    validation = [(record["tokens"], record["validation_loss"]) for record in records if "validation_loss" in record]
    if validation:
        axes.plot(*zip(*validation, strict=True), label="validation", marker="o", markersize=3)
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
