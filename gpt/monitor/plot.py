"""Plots of metrics.jsonl: a run's own loss, and the losses of several runs."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a cluster node

from matplotlib import pyplot


def plot_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training losses of several runs, by name, over tokens."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, records in runs.items():
        axes.plot([r["tokens"] for r in records], [r["loss"] for r in records], label=name, linewidth=1)
    _finish(figure, axes, path)


def plot_loss(records: list[dict[str, Any]], path: Path) -> None:
    """Training and validation loss over tokens."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    training = [(record["tokens"], record["loss"]) for record in records]
    axes.plot(*zip(*training, strict=True), label="training", linewidth=1)
    validation = [(record["tokens"], record["validation_loss"]) for record in records if "validation_loss" in record]
    if validation:
        axes.plot(*zip(*validation, strict=True), label="validation", marker="o", markersize=3)
    _finish(figure, axes, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.set(xlabel="tokens", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
