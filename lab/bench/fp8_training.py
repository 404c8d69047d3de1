"""Compare the losses of trainings with products in FP8 with those in bf16, from the same weights on the same batches.

python -m data.prepare --source stdlib --output runs/fp8_training/stdlib --train_vocab_size 4096
OMP_NUM_THREADS=1 python -m lab.bench.fp8_training --data runs/fp8_training/stdlib --output runs/fp8_training/losses

All is computed in fp32, which these CPUs multiply fast: the operands of products are rounded to bf16 first, those of
linear layers of blocks, of attention and of the head. The products of FP8 quantize these operands, as in a run in bf16.
Runs in fp32, which round nothing, say how much of a difference is chance: small changes grow over the steps.
OUTPUT.json gets the curve of each run as it ends, seed by seed, and a second start continues with the runs that are
left; OUTPUT.png is the plot, and the table is printed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from gpt.builder.train_state import TrainState
from gpt.model.transformer import GPT, Attention
from lab.bench import short_runs
from lab.bench.short_runs import Curve
from lab.pages.markdown import table
from lab.pages.plots import plot
from parallel.tensor.products import OwnPrecision, Products, Tensors
from zero.fp8.kernels import KERNELS
from zero.fp8.products import ScaledProducts
from zero.fp8.scaling import RECIPES

STEPS, EVALUATE_EVERY, NUM_VALIDATION_BATCHES = 1000, 250, 64
BASELINE, EXACT = "bf16", "fp32"  # EXACT: as the baseline, with operands that are not rounded
Curves = dict[str, dict[str, Curve]]  # by recipe and seed


def main() -> None:
    parser = short_runs.options_parser(__doc__, "prefix of token files with a vocabulary of 4096", STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, EXACT], default=[*KERNELS, EXACT])
    options = parser.parse_args()
    tokens = short_runs.tokens_of(options.data)
    runs = (
        (name, seed, partial(train, name, seed, tokens, options.steps))
        for seed in options.seeds
        for name in (BASELINE, *options.recipes)
    )
    curves = short_runs.complete(options.output.with_suffix(".json"), runs, kept=list)
    print("\n".join(table_of(curves)))
    draw(curves, options.output.with_suffix(".png"))


def train(name: str, seed: int, tokens: Tensor, num_steps: int) -> Curve:
    """Return the curve of a recipe."""
    arguments = [f"--config={Path(__file__).with_suffix('.yaml')}", f"--train.seed={seed}"]
    arguments += ["--train.matmul=fp8", f"--train.fp8.recipe={name}"] if name in RECIPES else []
    change = round_operands if name != EXACT else lambda _state: None
    return list(short_runs.train(arguments, tokens, num_steps, EVALUATE_EVERY, change, seed, NUM_VALIDATION_BATCHES))


class _Rounded(torch.autograd.Function):
    """The identity; its value, its gradient or both are rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: bool, gradient: bool) -> Tensor:
        ctx.gradient = gradient
        return in_bf16(x) if value else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return in_bf16(grad) if ctx.gradient else grad, None, None


def in_bf16(x: Tensor) -> Tensor:
    """Return the values of x in bf16, in its own type."""
    return x.bfloat16().to(x.dtype)


@dataclass(frozen=True)
class RoundedProducts:
    """Products of operands that are rounded to bf16: `Products` of a run in bf16."""

    products: Products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, with a graph."""
        return rounded_gradient(self.products.linear(rounded(x), rounded(weight), bias))

    def outputs(self, x: Tensor, weights: Tensors, biases: Tensors) -> list[Tensor]:
        """Return y for each weight, without a graph."""
        return self.products.outputs(in_bf16(x), [in_bf16(weight) for weight in weights], biases)

    def input_gradient(self, grads: Tensors, weights: Tensors) -> Tensor:
        """Return the gradient of x."""
        return self.products.input_gradient([in_bf16(grad) for grad in grads], [in_bf16(w) for w in weights])

    def weight_gradients(self, grads: Tensors, x: Tensor) -> list[Tensor]:
        """Return the gradient of each weight."""
        return self.products.weight_gradients([in_bf16(grad) for grad in grads], in_bf16(x))


def rounded(x: Tensor) -> Tensor:
    """Return an operand in bf16, through which gradients pass as they are."""
    return _Rounded.apply(x, True, False)


def rounded_gradient(y: Tensor) -> Tensor:
    """Return y, whose gradient is an operand."""
    return _Rounded.apply(y, False, True)


class RoundedHeadGPT(GPT):
    """A GPT whose head is rounded to bf16."""

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        return rounded(super().head_weight)


def round_operands(state: TrainState) -> None:
    """Let a model in fp32 round the operands of its products to bf16."""
    gpt: Any = state.model.module
    layer: Any
    for layer in gpt.modules():
        if isinstance(products := getattr(layer, "products", None), OwnPrecision | ScaledProducts):
            layer.products = RoundedProducts(products)
        if isinstance(layer, Attention):
            layer.kernel = partial(_attend, layer.kernel)
    gpt.__class__ = RoundedHeadGPT
    gpt.final_norm.register_forward_hook(lambda _norm, _inputs, output: rounded(output))


def _attend(kernel: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return rounded_gradient(kernel(rounded(q), rounded(k), rounded(v), *others))


def differences(curves: Curves, recipe: str) -> Iterator[Curve]:
    """Iterate over the differences of a recipe's curves from those of the baseline, seed by seed."""
    for seed, curve in curves[recipe].items():
        if seed in curves[BASELINE]:
            pairs = zip(curve, curves[BASELINE][seed], strict=True)
            yield [(step, loss - of_baseline) for (step, loss), (_, of_baseline) in pairs]


def table_of(curves: Curves) -> list[str]:
    """Return a table of the last losses, and of the mean difference from the baseline with its standard error."""
    rows = []
    for name, of_seed in curves.items():
        last = [f"{curve[-1][1]:.4f}" for curve in of_seed.values()]
        gaps = [curve[-1][1] for curve in differences(curves, name)]
        error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        rows.append(
            [name, ", ".join(last), *(["", ""] if name == BASELINE else [f"{mean(gaps):+.4f}", f"{error:.4f}"])]
        )
    return table(["products", "final validation losses", "mean difference from bf16", "its standard error"], rows)


def draw(curves: Curves, path: Path) -> None:
    with plot(path, 2, (9, 3.6)) as (left, right):
        for name in curves:
            (mean_line,) = left.plot(*_mean_curve(list(curves[name].values())), marker=".", label=name)
            if name != BASELINE:
                right.plot(*_mean_curve(list(differences(curves, name))), marker=".", color=mean_line.get_color())
        right.axhspan(-0.01, 0.01, color="gray", alpha=0.2)
        left.set(title="mean of the seeds", xlabel="step", ylabel="validation loss, nats per token")
        right.set(title="difference from bf16, 0.01 in gray", xlabel="step")


def _mean_curve(curves: list[Curve]) -> tuple[list[int], list[float]]:
    """Return (steps, the mean loss of the curves at each of them)."""
    steps = [step for step, _ in curves[0]]
    return steps, [mean(losses) for losses in zip(*([loss for _, loss in curve] for curve in curves), strict=True)]


if __name__ == "__main__":
    main()
