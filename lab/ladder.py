"""Train a family of sizes by one rule, and predict the loss of a larger size from those before it.

    python -m lab.ladder --output runs/ladder --tokens_per_parameter 2 -- --config configs/quickstart.yaml
    python -m lab.ladder --launch "sbatch --wait --nodes=2 scripts/launch/slurm.sbatch" --sizes 8x512 12x768 ... -- ...

Each size, LAYERSxHIDDEN, is a run of `pretrain_gpt.py` with the options after `--`, on --tokens_per_parameter tokens
for each of its parameters, with a twentieth of its steps as warm-up. The final validation losses L over the model FLOPs
C of the runs are fitted by L = A C^-b (least squares of their logarithms). The largest size is predicted before it is
trained, and then compared. Runs that are complete are not repeated, and one that was cut off goes on. Their output is
in OUTPUT/LAYERSxHIDDEN.log, and OUTPUT/ladder.png is the plot.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from gpt.settings.schedule import consumed_samples_after
from gpt.shape.config import parameter_shapes
from gpt.shape.flops import model_flops
from lab.bench.study import Run
from lab.dryrun.run_cost import steps_for
from lab.pages.plots import plot
from parallel.launch.preflight import split_words
from parallel.validation.errors import ConfigError, exit_on_config_error

SIZES = "1x32", "2x48", "2x64", "3x96", "4x128"
WARMUP_PART = 20  # of the steps
FEWEST_POINTS = 3  # with which a fit has an error


@dataclass(frozen=True)
class Rung:
    """One size of the family, and its run."""

    name: str
    run: Run

    @property
    def parameters(self) -> int:
        model = self.run.settings.model
        return sum(math.prod(shape) for _, shape in parameter_shapes(model, model.vocab_size))

    @property
    def samples(self) -> int:
        train = self.run.settings.train
        return consumed_samples_after(train, train.steps)

    @property
    def flops(self) -> float:
        return float(model_flops(self.run.settings.model, self.samples))


@dataclass(frozen=True)
class PowerLaw:
    """The line through (log FLOPs, log loss), by least squares."""

    flops: tuple[float, ...]
    losses: tuple[float, ...]

    @cached_property
    def slope_and_start(self) -> tuple[float, float]:
        slope, start = np.polyfit(np.log(self.flops), np.log(self.losses), 1)
        return float(slope), float(start)

    def predict(self, flops: float) -> tuple[float, float]:
        """Return (loss, its standard error), which is NaN with fewer than three points."""
        slope, start = self.slope_and_start
        loss = math.exp(start + slope * math.log(flops))
        if len(self.flops) < FEWEST_POINTS:
            return loss, math.nan
        x, y = np.log(self.flops), np.log(self.losses)
        variance = float(((y - start - slope * x) ** 2).sum()) / (len(x) - 2)
        distance = (math.log(flops) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
        return loss, loss * math.sqrt(variance * (1 + 1 / len(x) + float(distance)))


def rung(size: str, options: argparse.Namespace, arguments: Sequence[str]) -> Rung:
    """Return a size of the family. Raises ConfigError if it is not LAYERSxHIDDEN, or its settings are refused."""
    layers, _, hidden = size.partition("x")
    if not (layers.isdigit() and hidden.isdigit()):
        raise ConfigError(f"--sizes: {size} is not LAYERSxHIDDEN, such as 4x128")
    words = [*arguments, f"--model.num_layers={layers}", f"--model.hidden_size={hidden}"]
    words += [f"--model.num_heads={max(1, int(hidden) // options.head_size)}", f"--run.dir={options.output / size}"]
    words += [f"--model.mup_base_width={options.mup_base_width}"] if options.mup_base_width else []
    shape = Rung(size, Run(tuple(words)))
    steps = steps_for(options.tokens_per_parameter * shape.parameters, shape.run.settings)
    words += [f"--train.steps={steps}", f"--schedule.warmup_steps={max(1, steps // WARMUP_PART)}"]
    return Rung(size, Run(tuple(words)))


def climb(rungs: Sequence[Rung], launch: str, console: Console) -> PowerLaw:
    """Train all sizes, of which the last is the largest; say what is predicted for it before, and return the law."""
    *smaller, largest = rungs
    losses = [one.run.train(launch) for one in smaller]
    law = PowerLaw(tuple(one.flops for one in smaller), tuple(losses))
    predicted, error = law.predict(largest.flops)
    console.print(f"{largest.name}: predicted from {len(smaller)} smaller ones: {predicted:.4f} ± {error:.4f}")
    loss = largest.run.train(launch)
    console.print(f"{largest.name}: trained: {loss:.4f}, {loss - predicted:+.4f} from the prediction")
    return PowerLaw((*law.flops, largest.flops), (*law.losses, loss))


def show(rungs: Sequence[Rung], law: PowerLaw, path: Path, console: Console) -> None:
    """Print the sizes and the law, and plot them."""
    table = Table("size", "parameters", "tokens", "FLOPs", "validation loss", "fitted")
    for one, trained in zip(rungs, law.losses, strict=True):
        tokens = one.samples * one.run.settings.model.seq_length
        losses = f"{trained:.4f}", f"{law.predict(one.flops)[0]:.4f}"
        table.add_row(one.name, f"{one.parameters:,}", f"{tokens:,}", f"{one.flops:.3g}", *losses)
    console.print(table)
    slope, start = law.slope_and_start
    following = law.flops[-1] ** 2 / law.flops[-2]
    loss, error = law.predict(following)
    console.print(f"L = {math.exp(start):.4g} C^{slope:.4f}; with {following:.3g} FLOPs: {loss:.4f} ± {error:.4f}")
    with plot(path, size=(7, 4.5)) as (axes,):
        axes.plot(law.flops, law.losses, "o", label="trained")
        flops = np.geomspace(law.flops[0], following)
        losses, errors = np.array([law.predict(number) for number in flops]).T
        axes.plot(flops, losses, label="fitted")
        axes.fill_between(flops, losses - errors, losses + errors, alpha=0.2, label="standard error")
        axes.set(xscale="log", yscale="log", xlabel="model FLOPs", ylabel="validation loss, nats per token")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="LAYERSxHIDDEN of each; at least three")
    parser.add_argument("--tokens_per_parameter", type=float, default=20.0)
    parser.add_argument("--head_size", type=int, default=32)
    parser.add_argument("--mup_base_width", type=int, help="muP: the hidden size for which the learning rate was tuned")
    parser.add_argument(
        "--launch", default="scripts/launch/torchrun.sh", help="command that starts a run, before its options"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and the plot")
    own, arguments = split_words(words)
    options = parser.parse_args(own)
    sizes = dict.fromkeys(options.sizes)
    if len(sizes) < FEWEST_POINTS:
        raise ConfigError(f"--sizes has {len(sizes)} sizes; a prediction needs at least {FEWEST_POINTS}")
    if options.head_size < 1:
        raise ConfigError(f"--head_size={options.head_size} is below 1; choose 1 or more")
    rungs = sorted((rung(size, options, arguments) for size in sizes), key=lambda one: one.flops)
    console = Console(highlight=False)
    law = climb(rungs, options.launch, console)
    show(rungs, law, options.output / "ladder.png", console)


if __name__ == "__main__":
    with exit_on_config_error(OSError):  # of the launch command, too
        main(sys.argv[1:])
