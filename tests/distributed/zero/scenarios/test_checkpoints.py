"""torch.utils.checkpoint, reentrant and not, around models, blocks and functions inside blocks, and nested."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.procedures import NON_REENTRANT, REENTRANT, BlockWith, With, adapted, calling, linear, trains, trains_by
from tests.scenarios import Block, Blocks, Model, Run, as_test, cases, mean_square

KINDS = (REENTRANT, NON_REENTRANT)
PAIRS = list(itertools.product(KINDS, KINDS))


class AroundBlocks(Blocks):
    """`kinds` has a kind of checkpoint for each block, or None."""

    def __init__(self, *kinds: Any, blocks: list[nn.Module] | None = None) -> None:
        super().__init__(*(blocks or (Block() for _ in kinds)))
        self.kinds = kinds

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            x = kind(block, x) if kind else block(x)
        return x


def inside(kind: Any) -> nn.Module:
    return BlockWith(lambda m, x: x + kind(m.mlp, x))


def twice(outer: Any, inner: Any) -> nn.Module:
    return BlockWith(lambda m, x: x + outer(lambda x: inner(m.mlp, x) * m.scale, x))


def ends_in_checkpoint(kind: Any) -> nn.Module:
    """Return a model whose first gradient arrives inside the recomputation: nothing follows it, not even the loss."""
    return With(lambda m, x: kind(lambda x: mean_square(m.body.head, x), m.body.encode(x)), body=Blocks())


def loss_around_the_model(kind: Any, model: Model, x: Tensor) -> Tensor:
    return (kind(model, x.clone().requires_grad_()) - 0.5).square().mean()


def fail(*_: object) -> None:
    raise KeyError("on purpose")


def failing() -> nn.Module:
    """Return a block whose recomputation, or a hook in whose inner backward, raises."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.block(x)
        if m.fails == "recomputation" and torch.is_grad_enabled():
            fail()
        if m.fails == "hook" and y.requires_grad:
            y.register_hook(fail)
        return y

    return With(forward, block=Block(), fails="")


def a_step_after_one_that_raised_in_backward(run: Run) -> None:
    for kind, ways in ((REENTRANT, ("recomputation", "hook")), (NON_REENTRANT, ("hook",))):
        model, optimizer = run.start(AroundBlocks(kind, kind, kind, blocks=[failing() for _ in range(3)]))
        for step, fails in enumerate(ways * 2):
            block = model.module.blocks[step % 3]
            block.fails = fails
            with pytest.raises(KeyError, match="on purpose"):
                mean_square(model, run.batch(30)).backward()
            block.fails = ""
            optimizer.zero_grad()
            run.train(model, optimizer, steps=[2 * step, 2 * step + 1])


def reading_other_units(kind: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = m.blocks
        x = kind(lambda x: first(x) @ second.up.weight.t()[:, :4] @ m.head.weight.t(), m.head.weight[0] * x)
        return kind(lambda x: second(torch.cat([x, x], 1)) @ first.down.weight, x)

    return With(forward, blocks=nn.ModuleList([Block(), Block()]), head=nn.Linear(4, 2))


def with_frozen(kind: Any) -> nn.Module:
    return calling(kind, adapted(), Block().requires_grad_(False), adapted())


def nested_units() -> nn.Module:
    blocks = [With(lambda m, x: m.down(m.expert(x)), expert=Block(), down=linear()) for _ in range(2)]
    return calling(NON_REENTRANT, *blocks)


TABLE = {
    "checkpoints": cases(
        {
            "around blocks": trains(
                lambda: AroundBlocks(REENTRANT, None, NON_REENTRANT, REENTRANT), lambda: AroundBlocks(*KINDS[1:] * 3)
            ),
            "nested": trains(
                lambda: AroundBlocks(*(outer for outer, _ in PAIRS), blocks=[inside(inner) for _, inner in PAIRS]),
                lambda: Blocks(*(twice(outer, inner) for outer, inner in PAIRS)),
            ),
            "the first gradient is inside": trains(
                *(partial(ends_in_checkpoint, kind) for kind in KINDS), loss=lambda model, x: model(x)
            ),
            "around the model": trains(Blocks, loss=partial(loss_around_the_model, NON_REENTRANT)),
            "around the model, reentrant": trains(Blocks, loss=partial(loss_around_the_model, REENTRANT)),
            "weights of other units": trains(*(partial(reading_other_units, kind) for kind in KINDS)),
            "DeepSpeed#8130, DeepSpeed#8148: frozen": trains(*(partial(with_frozen, kind) for kind in KINDS)),
            "pytorch#164009, VeOmni#1043: nested units": trains_by(
                nested_units, lambda model, x: mean_square(model, x).backward(), units=("blocks.*", "blocks.*.expert")
            ),
        },
        a_step_after_one_that_raised_in_backward,
    )
}

test_scenario = as_test(__name__, TABLE)
