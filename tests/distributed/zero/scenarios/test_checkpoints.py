"""torch.utils.checkpoint, reentrant and not, around models, blocks and functions inside blocks, and nested."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.scenarios import DEFAULT, GROUPS, HOST, Block, Blocks, Model, Run, mean_square, scenario

REENTRANT = partial(checkpoint, use_reentrant=True)
OTHER = partial(checkpoint, use_reentrant=False)
KINDS = (REENTRANT, OTHER)


class AroundBlocks(Blocks):
    """`kinds` has a kind of checkpoint for each block, or None."""

    def __init__(self, *kinds: Any, block: type[nn.Module] = Block) -> None:
        super().__init__(*(block() for _ in kinds))
        self.kinds = kinds

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            x = kind(block, x) if kind else block(x)
        return x


class InsideBlock(Block):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kind(self.mlp, x)


def train_each(run: Run, modules: list[nn.Module], num_steps: int = 2) -> None:
    for module in modules:
        run.train_module(module, steps=range(num_steps))


@scenario(DEFAULT + HOST + GROUPS)
def test_checkpoints_are_around_blocks(run: Run) -> None:
    all_alike = [AroundBlocks(kind, kind, kind) for kind in KINDS]
    train_each(run, [*all_alike, AroundBlocks(REENTRANT, None, OTHER, REENTRANT)], num_steps=3)


class Twice(Block):
    def __init__(self, outer: Any, inner: Any) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(lambda x: self.inner(self.mlp, x) * self.scale, x)


@scenario()
def test_checkpoints_are_inside_blocks_and_nested(run: Run) -> None:
    train_each(run, [Blocks(InsideBlock(kind), Block()) for kind in KINDS])
    pairs = list(itertools.product(KINDS, KINDS))
    around = AroundBlocks(*(outer for outer, _ in pairs))
    around.blocks = nn.ModuleList(InsideBlock(inner) for _, inner in pairs)
    train_each(run, [around, Blocks(*(Twice(outer, inner) for outer, inner in pairs))])


class EndsInCheckpoint(Blocks):
    """The first gradient of its backward arrives inside the recomputation: nothing follows it, not even the loss."""

    def __init__(self, kind: Any, num_blocks: int = 2) -> None:
        super().__init__(*(Block() for _ in range(num_blocks)))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(lambda x: (self.head(x) - 0.5).square().mean(), self.encode(x))


@scenario(DEFAULT + HOST)
def test_the_first_gradient_arrives_inside_a_checkpoint(run: Run) -> None:
    for kind in KINDS:
        run.train_module(EndsInCheckpoint(kind), lambda model, x: model(x), steps=range(3))


@scenario()
def test_a_checkpoint_is_around_the_wrapped_model(run: Run) -> None:
    def loss(kind: Any, model: Model, x: Tensor) -> Tensor:
        return (kind(model, x.clone().requires_grad_()) - 0.5).square().mean()

    for kind in KINDS:
        run.train_module(Blocks(), partial(loss, kind), steps=range(3))


@scenario()
def test_checkpoints_and_accumulation(run: Run) -> None:
    for kind in KINDS:
        model = run.wrap(AroundBlocks(kind, kind))
        optimizer = run.optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            with model.accumulate():
                run.record(mean_square(model, run.batch(10 + step))).backward()
            run.record(mean_square(model, run.batch(step))).backward()
            optimizer.step()


class FailsInBackward(nn.Module):
    """A block whose recomputation, or a hook in whose inner backward, raises."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.fails = Block(), ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if self.fails == "recomputation" and torch.is_grad_enabled():
            raise KeyError("on purpose")
        if self.fails == "hook" and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, _grad: Tensor) -> None:
        raise KeyError("on purpose")


@scenario(DEFAULT + HOST)
def test_a_step_after_a_checkpoint_that_raised_in_backward_is_as_usual(run: Run) -> None:
    for kind, ways in ((REENTRANT, ("recomputation", "hook")), (OTHER, ("hook",))):
        model = run.wrap(AroundBlocks(kind, kind, kind, block=FailsInBackward))
        optimizer = run.optimizer(model)
        for step, fails in enumerate(ways * 2):
            failing = model.module.blocks[step % 3]
            failing.fails = fails
            with pytest.raises(KeyError, match="on purpose"):
                mean_square(model, run.batch(30)).backward()
            failing.fails = ""
            optimizer.zero_grad()
            run.train(model, optimizer, steps=[2 * step, 2 * step + 1])


@scenario()
def test_a_checkpoint_reads_weights_of_other_units(run: Run) -> None:
    class Reads(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.kind = kind
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.blocks
            x = self.kind(
                lambda x: first(x) @ second.up.weight.t()[:, :4] @ self.head.weight.t(), self.head.weight[0] * x
            )
            return self.kind(lambda x: second(torch.cat([x, x], 1)) @ first.down.weight, x)

    train_each(run, [Reads(kind) for kind in KINDS])
