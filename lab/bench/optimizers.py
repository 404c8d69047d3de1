"""Compare how fast Muon and AdamW learn, each at its best learning rate, with nanoGPT's settings for a CPU.

python -m data.prepare --source stdlib --characters --output runs/optimizers/stdlib
OMP_NUM_THREADS=1 python -m lab.bench.optimizers --data runs/optimizers/stdlib --output runs/optimizers/losses

The model and the batches are those of configs/shakespeare.yaml, on the characters of any text. AdamW trains for STEPS
steps, and Muon for three quarters of them, at several learning rates each, with a cosine decay to their own last step.
OUTPUT.json gets the curve of each run as it ends, and a second start continues with the runs that are left; OUTPUT.png
is the plot, and the table is printed.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from lab.bench import short_runs
from lab.bench.short_runs import Curve
from lab.pages.markdown import table
from lab.pages.plots import plot

STEPS, EVALUATE_EVERY = 2000, 100
RATES = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (2e-3, 4e-3, 8e-3, 16e-3)}
PARTS = {"adamw": 1.0, "muon": 0.75}  # of the steps
SETTINGS = ["--config", "configs/shakespeare.yaml", "--train.micro_batch_size", "12"]
OF_OPTIMIZER = {"adamw": [], "muon": ["--optimizer.muon.ns_dtype", "fp32"]}  # few CPUs multiply in bf16


def main() -> None:
    parser = short_runs.options_parser(__doc__, "prefix of token files of characters", STEPS)
    parser.add_argument("--num_rates", type=int, help="learning rates of each optimizer (all)")
    options = parser.parse_args()
    tokens = short_runs.tokens_of(options.data)
    runs = (
        (name, rate, partial(train, name, rate, tokens, options.steps))
        for name, rates in RATES.items()
        for rate in rates[: options.num_rates]
    )
    curves = short_runs.complete(options.output.with_suffix(".json"), runs, kept=list)
    print("\n".join(table_of(curves)))
    draw(curves, options.output.with_suffix(".png"))


def train(name: str, rate: float, tokens: Tensor, num_steps: int) -> Curve:
    """Return the curve of an optimizer; `num_steps` are those of AdamW."""
    arguments = [*SETTINGS, *OF_OPTIMIZER[name], f"--optimizer.name={name}", f"--optimizer.lr={rate}"]
    arguments += [f"--model.vocab_size={int(tokens.max()) + 1}", f"--schedule.min_lr={rate / 10}"]
    return list(short_runs.train(arguments, tokens, round(num_steps * PARTS[name]), EVALUATE_EVERY))


def best(of_rate: dict[str, Curve]) -> tuple[str, Curve]:
    """Return (learning rate, curve) of the run that ends with the lowest loss."""
    return min(of_rate.items(), key=lambda item: item[1][-1][1])


def table_of(curves: dict[str, dict[str, Curve]]) -> list[str]:
    """Return a table with a row for each run; the lowest loss of an optimizer is bold."""
    rows = []
    for name, of_rate in curves.items():
        for rate, curve in of_rate.items():
            step, loss = curve[-1]
            rows.append([name, rate, step, f"**{loss:.3f}**" if rate == best(of_rate)[0] else f"{loss:.3f}"])
    return table(["optimizer", "learning rate", "steps", "validation loss"], rows)


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    with plot(path, size=(7, 4.5)) as (axes,):
        for name, of_rate in curves.items():
            chosen, curve = best(of_rate)
            (line,) = axes.plot(*zip(*curve, strict=True), marker=".", label=f"{name}, learning rate {chosen}")
            for rate, other in of_rate.items():
                if rate != chosen:
                    axes.plot(*zip(*other, strict=True), color=line.get_color(), alpha=0.25, linewidth=1)
        _, reached = best(curves["adamw"])
        axes.axhline(reached[-1][1], color="gray", linestyle=":", linewidth=1)
        axes.set(title="the best learning rate of each, others faint", xlabel="step", ylabel="validation loss, nats")


if __name__ == "__main__":
    main()
