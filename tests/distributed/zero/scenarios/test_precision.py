"""Autocast, modules in half precision, and models of several dtypes."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.procedures import NON_REENTRANT, REENTRANT, With, trains_parts
from tests.scenarios import WIDTH, Block, Blocks, Model, Procedure, Run, as_test, cases

# Gradients in float32 are sums of a few terms of at most 1, each rounded to 2**-24.
FLOAT = 64 * 2**-24
# A weight in bfloat16 is rounded once a step here, and twice in torch: one unit in the last place of 1 is 2**-7.
HALF = 2**-6


def error_of(output: Tensor) -> Tensor:
    return (output.float() - 0.5).square().mean()


def autocast(**settings: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **settings)


def under_autocast(model: Model, x: Tensor, _rank: int = 0) -> Tensor:
    with autocast():
        output = model(x)
    return error_of(output)


def encode(is_inside: bool, m: nn.Module, x: Tensor) -> Tensor:
    """Run checkpointed blocks, and inside the model under autocast."""
    with autocast() if is_inside else nullcontext():
        x = m.embed(x)
        for checkpoint, block in zip((REENTRANT, NON_REENTRANT), m.blocks, strict=True):
            x = checkpoint(block, x)
    return m.head(x.float() if is_inside else x)


def checkpointed(is_inside: bool) -> nn.Module:
    parts = Blocks()
    return With(partial(encode, is_inside), embed=parts.embed, blocks=parts.blocks, head=parts.head)


def of_several_forwards(model: Model, x: Tensor, _rank: int = 0) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return (model(x) - model(x.sin()) + target).float().square().mean()


def around_several_forwards(caches_in_torch: bool) -> Procedure:
    """Plain torch adds the gradients of one cast weight in half precision, unless its cache of casts is off."""

    def procedure(run: Run) -> None:
        with autocast(cache_enabled=caches_in_torch or not run.is_plain):
            trains_parts(Blocks, of_several_forwards)(run)

    return procedure


def with_block_in_half_precision() -> nn.Module:
    module = Blocks(*(With(lambda m, x: m.block(x.to(m.block.scale.dtype)), block=Block()) for _ in range(3)))
    module.blocks[1].bfloat16()
    module.head = With(lambda m, x: m.linear(x.float()), linear=nn.Linear(WIDTH, 2))
    module.head.linear.weight.requires_grad_(False)
    return module


def with_adapter() -> nn.Module:
    """Return an adapter on a base in half precision."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.base(x.bfloat16()).to(x.dtype) + m.up(m.down(x))

    base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
    return With(forward, base=base, down=nn.Linear(WIDTH, 2, bias=False), up=nn.Linear(2, WIDTH, bias=False))


def error(model: Model, x: Tensor, _rank: int) -> Tensor:
    return error_of(model(x))


TABLE = {
    "autocast": cases(
        {
            "around the model": trains_parts(Blocks, under_autocast),
            "inside the model": trains_parts(partial(checkpointed, True), error),
            "around checkpoints": trains_parts(partial(checkpointed, False), under_autocast),
        },
        tolerance=FLOAT,
        dtype=torch.float32,
    ),
    "autocast-around-forwards": cases(
        {"below stage 3": around_several_forwards(True)}, stages=[0, 1, 2], tolerance=FLOAT, dtype=torch.float32
    )
    | cases({"stage 3": around_several_forwards(False)}, stages=[3], tolerance=FLOAT, dtype=torch.float32),
    "half-precision": cases(
        {"some layers": trains_parts(with_block_in_half_precision, error)}, tolerance=HALF, dtype=torch.float32
    )
    | cases(
        {"frozen parameters": trains_parts(lambda: Blocks(with_adapter(), with_adapter()), error)},
        tolerance=FLOAT,
        dtype=torch.float32,
    ),
}

test_scenario = as_test(__name__, TABLE)
