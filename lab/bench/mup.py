"""Compare the best learning rates of narrow and wide models, with and without muP.

python -m data.prepare --source stdlib --output runs/mup/stdlib --train_vocab_size 512
OMP_NUM_THREADS=1 python -m lab.bench.mup --data runs/mup/stdlib --output runs/mup/losses

Each model trains on the same batches for a few hundred steps. OUTPUT.json gets the validation loss of each run as it
ends, and a second start continues with the runs that are left; OUTPUT.png is the plot, and the table is printed.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot

from lab.bench import short_runs

WIDTHS, BASE_WIDTH, HEAD_DIM = (32, 64, 128, 256), 256, 16
RATES = [2.0**power for power in range(-11, -5)]
SEQ_LENGTH, BATCH_SIZE = 64, 8
KINDS = STANDARD, MUP = "standard", "muP"
SETTINGS = {
    "model.num_layers": 2,
    "model.seq_length": SEQ_LENGTH,
    "model.vocab_size": 512,
    "model.dropout": 0.0,
    "schedule.warmup_steps": 20,
    "schedule.decay": "linear",
    "train.precision": "fp32",
    "train.micro_batch_size": BATCH_SIZE,
    "train.global_batch_size": BATCH_SIZE,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="prefix of token files with a vocabulary of 512")
    parser.add_argument("--output", type=Path, required=True, help="prefix of OUTPUT.json and OUTPUT.png")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = short_runs.tokens_of(options.data)
    runs = (
        (f"{kind}, width {width}", rate, partial(train, kind, width, rate, tokens, options.steps))
        for width in options.widths
        for rate in RATES
        for kind in KINDS[: 1 if width == BASE_WIDTH else 2]  # at the base width they are the same
    )
    losses = short_runs.complete(options.output.with_suffix(".json"), runs, kept=lambda curve: curve[-1][1])
    print(table(losses))
    draw(losses, options.output.with_suffix(".png"))


def train(kind: str, width: int, rate: float, tokens: Tensor, num_steps: int) -> short_runs.Curve:
    """Return the curve of a model, which has its last step only."""
    settings = SETTINGS | {"model.hidden_size": width, "model.num_heads": width // HEAD_DIM, "optimizer.lr": rate}
    settings |= {"model.mup_base_width": BASE_WIDTH} if kind == MUP else {}
    return list(short_runs.train([f"--{name}={value}" for name, value in settings.items()], tokens, num_steps))


def table(losses: dict[str, dict[str, float]]) -> str:
    """Return a row for each model; the lowest loss is bold."""
    lines = ["| | " + " | ".join(f"2^{math.log2(rate):.0f}" for rate in RATES) + " |", "|---" * (len(RATES) + 1) + "|"]
    for name, of_rate in losses.items():
        best = min(of_rate.values())
        shown = (f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in of_rate.values())
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def draw(losses: dict[str, dict[str, float]], path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    for kind, axes in zip(KINDS, panels, strict=True):
        for name, of_rate in losses.items():
            if name.startswith(kind) or name.endswith(f" {BASE_WIDTH}"):
                rates, values = [float(rate) for rate in of_rate], list(of_rate.values())
                (line,) = axes.plot(rates, values, marker=".", label=name.rpartition(", ")[2])
                best = values.index(min(values))
                axes.plot(rates[best], values[best], marker="o", color=line.get_color())
        axes.set(title=kind, xlabel="learning rate")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("validation loss, nats per token")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
