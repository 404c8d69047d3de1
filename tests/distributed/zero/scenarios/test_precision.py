"""Autocast, modules in half precision, and models of several dtypes."""

import torch
from torch import Tensor, nn

from tests.scenarios import (
    DEFAULT,
    HOST,
    STAGE_3,
    STAGES,
    WIDTH,
    Block,
    Blocks,
    Configuration,
    Model,
    Run,
    mean_square,
    scenario,
)

# Gradients in float32 are sums of a few terms of at most 1, each rounded to 2**-24.
FLOAT = 64 * 2**-24
# A weight in bfloat16 is rounded once a step here, and twice in torch: one unit in the last place of 1 is 2**-7.
HALF = 2**-6


def train_parts(run: Run, model: Model, loss: object = mean_square, num_steps: int = 2) -> None:
    """Train on each rank's rows by themselves: in half precision, sums over other rows have other roundings."""
    optimizer = run.optimizer(model, lr=2**-5)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in run.parts(step):
            (loss(model, part) / len(run.parts(step))).backward()
        optimizer.step()


def under_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    return (output.float() - 0.5).square().mean()


class AutocastInside(Blocks):
    def encode(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
        return x.float()


@scenario(DEFAULT + HOST, tolerance=FLOAT, dtype=torch.float32)
def test_autocast_is_around_the_model(run: Run) -> None:
    train_parts(run, run.wrap(Blocks()), under_autocast)


def loss_of_several_forwards(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return (model(x) - model(x.sin()) + target).float().square().mean()


@scenario([Configuration(0), Configuration(1), Configuration(2), Configuration(2, "local")], FLOAT, torch.float32)
def test_autocast_is_around_several_forwards_and_their_backwards(run: Run) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        train_parts(run, run.wrap(Blocks()), loss_of_several_forwards)


@scenario(STAGE_3, FLOAT, torch.float32)
def test_casts_are_not_kept_from_one_call_of_a_unit_to_the_next(run: Run) -> None:
    """Plain torch adds the gradients of one cast weight in half precision; without its cache of casts, as here."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=not run.is_plain):
        train_parts(run, run.wrap(Blocks()), loss_of_several_forwards)


@scenario(tolerance=FLOAT, dtype=torch.float32)
def test_autocast_is_inside_the_model(run: Run) -> None:
    train_parts(run, run.wrap(AutocastInside()))


@scenario(tolerance=FLOAT, dtype=torch.float32)
def test_autocast_is_around_checkpoints(run: Run) -> None:
    class Checkpointed(Blocks):
        def encode(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block, is_reentrant in zip(self.blocks, (True, False), strict=True):
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=is_reentrant)
            return x

    train_parts(run, run.wrap(Checkpointed()), under_autocast)


@scenario(tolerance=HALF, dtype=torch.float32)
def test_some_layers_are_in_half_precision(run: Run) -> None:
    class Mixed(Blocks):
        def encode(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x.to(block.scale.dtype))
            return x.float()

    module = Mixed(Block(), Block(), Block())
    module.blocks[1].bfloat16()
    module.head.weight.requires_grad_(False)
    train_parts(run, run.wrap(module))


@scenario(STAGES, tolerance=FLOAT, dtype=torch.float32)
def test_frozen_parameters_have_another_dtype(run: Run) -> None:
    """Adapters on a base model in half precision."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x.bfloat16()).to(x.dtype) + self.up(self.down(x))

    train_parts(run, run.wrap(Blocks(Adapter(), Adapter())))
