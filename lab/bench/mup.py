"""Compare the best learning rates of narrow and wide models, with and without muP.

python -m data.prepare --source stdlib --output runs/mup/stdlib --train_vocab_size 512
OMP_NUM_THREADS=1 python -m lab.bench.mup --data runs/mup/stdlib --output runs/mup/losses

Each model trains on the same batches for a few hundred steps. OUTPUT.json gets the validation loss of each run as it
ends, and a second start continues with the runs that are left; OUTPUT.png is the plot, and the table is printed.
"""

import math
from functools import partial
from pathlib import Path

from torch import Tensor

from lab.bench import short_runs
from lab.pages.markdown import table
from lab.pages.plots import plot

WIDTHS, BASE_WIDTH, HEAD_DIM = (32, 64, 128, 256), 256, 16
RATES = [2.0**power for power in range(-11, -5)]
KINDS = STANDARD, MUP = "standard", "muP"


def main() -> None:
    parser = short_runs.options_parser(__doc__, "prefix of token files with a vocabulary of 512", num_steps=300)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options = parser.parse_args()
    tokens = short_runs.tokens_of(options.data)
    runs = (
        (f"{kind}, width {width}", rate, partial(train, kind, width, rate, tokens, options.steps))
        for width in options.widths
        for rate in RATES
        for kind in KINDS[: 1 if width == BASE_WIDTH else 2]  # at the base width they are the same
    )
    losses = short_runs.complete(options.output.with_suffix(".json"), runs, kept=lambda curve: curve[-1][1])
    print("\n".join(table_of(losses)))
    draw(losses, options.output.with_suffix(".png"))


def train(kind: str, width: int, rate: float, tokens: Tensor, num_steps: int) -> short_runs.Curve:
    """Return the curve of a model, which has its last step only."""
    arguments = [f"--config={Path(__file__).with_suffix('.yaml')}", f"--optimizer.lr={rate}"]
    arguments += [f"--model.hidden_size={width}", f"--model.num_heads={width // HEAD_DIM}"]
    arguments += [f"--model.mup_base_width={BASE_WIDTH}"] if kind == MUP else []
    return list(short_runs.train(arguments, tokens, num_steps))


def table_of(losses: dict[str, dict[str, float]]) -> list[str]:
    """Return a table with a row for each model; the lowest loss is bold."""
    rows = []
    for name, of_rate in losses.items():
        best = min(of_rate.values())
        rows.append([name, *(f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in of_rate.values())])
    return table(["", *(f"2^{math.log2(rate):.0f}" for rate in RATES)], rows)


def draw(losses: dict[str, dict[str, float]], path: Path) -> None:
    with plot(path, len(KINDS), (10, 4.5), sharey=True) as panels:
        for kind, axes in zip(KINDS, panels, strict=True):
            for name, of_rate in losses.items():
                if name.startswith(kind) or name.endswith(f" {BASE_WIDTH}"):
                    rates, values = [float(rate) for rate in of_rate], list(of_rate.values())
                    (line,) = axes.plot(rates, values, marker=".", label=name.rpartition(", ")[2])
                    best = values.index(min(values))
                    axes.plot(rates[best], values[best], marker="o", color=line.get_color())
            axes.set(title=kind, xlabel="learning rate")
            axes.set_xscale("log", base=2)
        panels[0].set_ylabel("validation loss, nats per token")


if __name__ == "__main__":
    main()
