"""Operations that change a tensor in place: the input or the output of a block or of the model, or a view of it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import DEFAULT, HOST, STAGES, WIDTH, Block, Blocks, Calls, Model, Run, mean_square, scenario


class Changes(Block):
    """A block that changes its input in place, then computes with it."""

    change: Callable[[Tensor], object] = staticmethod(torch.sin)  # which changes nothing

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return self.mlp(x)


def mul_(x: Tensor) -> None:
    x.mul_(2)


def relu_(x: Tensor) -> None:
    nn.functional.relu(x, inplace=True)


def add_(x: Tensor) -> None:
    x += 1


def index_(x: Tensor) -> None:
    x[:, 1:] = x[:, :-1].clone() * 3


def masked_fill_(x: Tensor) -> None:
    x.masked_fill_(x > 0, 0.25)


def view_(x: Tensor) -> None:
    x.view(-1, 2)[:, 1:].sin_()


CHANGES = [mul_, relu_, add_, index_, masked_fill_, view_]


def train_each(run: Run, call: Callable[[nn.Module, Tensor], Tensor], changes: list = CHANGES) -> None:
    model, optimizer = run.start(Calls(call, Changes(), Changes()))
    for step, change in enumerate(change for change in changes for _ in range(2)):
        for block in model.module.blocks:
            block.change = change
        run.train(model, optimizer, steps=[step])


@scenario(DEFAULT + HOST)
def test_the_caller_reads_an_input_that_the_block_has_changed(run: Run) -> None:
    def call(block: nn.Module, h: Tensor) -> Tensor:
        h = h * 1
        y = block(h)
        return (y + h * h).tanh()

    train_each(run, call)


@scenario()
def test_a_block_changes_an_input_that_is_a_view(run: Run) -> None:
    def call(block: nn.Module, h: Tensor) -> Tensor:
        wide = torch.cat([h, h.sin()], dim=1)
        y = block(wide[:, 1 : WIDTH + 1])
        return (y + wide[:, WIDTH:] * wide[:, :WIDTH]).tanh()

    train_each(run, call, [mul_, relu_, add_, index_])


@scenario()
def test_the_input_of_a_block_is_a_chunk(run: Run) -> None:
    """Torch forbids to change a chunk in place; it may be an input."""

    def call(block: nn.Module, h: Tensor) -> Tensor:
        first, second = torch.cat([h, h.sin()], dim=1).chunk(2, dim=1)
        return block(first) + second

    model = run.wrap(Calls(call, Block(), Block()))
    run.train(model, run.optimizer(model))
    model = run.wrap(Calls(call, Changes()))
    model.module.blocks[0].change = mul_
    with pytest.raises(RuntimeError, match="view"):
        mean_square(model, run.batch(0))
    model.module.blocks[0].change = torch.sin
    run.train(model, run.optimizer(model))


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.change, self.linear = CHANGES[0], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return self.linear(x)


@scenario()
def test_the_model_changes_its_input(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        changed, constant = x * torch.ones(WIDTH, requires_grad=True), x.clone()
        y = model(changed) + model(constant)
        return (y + changed * changed + constant).tanh().square().mean()

    model, optimizer = run.start(Root())
    for step, change in enumerate(change for change in CHANGES for _ in range(2)):
        model.module.change = change
        run.train(model, optimizer, loss, steps=[step])


@scenario()
def test_the_caller_changes_the_output_of_a_block_and_the_loss_that_of_the_model(run: Run) -> None:
    def call(block: nn.Module, h: Tensor) -> Tensor:
        y = block(h)
        y *= 0.5
        y[:, 0] = h[:, 1]
        y += h
        return y

    run.train_module(Calls(call, Block(), Block()), lambda model, x: model(x).sub_(0.5).pow_(2).mean())


class ReturnsInput(nn.Module):
    """A block that returns its input, changed, or a view of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "changed":
            return x.add_(self.linear(x.clone()))
        if self.way == "view":
            return torch.cat([x, self.linear(x)], dim=1)[:, 2 : WIDTH + 2]
        if self.way == "view of the input":
            return x.view(-1, WIDTH)[:, :]
        return x


@scenario()
def test_a_block_returns_its_input_or_a_view_of_it(run: Run) -> None:
    for way in ("changed", "view", "view of the input", "unchanged"):
        blocks = ReturnsInput(way), Block(), ReturnsInput(way), ReturnsInput("changed")
        run.train_module(Calls(lambda block, h: block(h * 1), *blocks))


class Counts(Block):
    """A block that changes buffers in place: a counter and an average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.ones.mul_(0.9)
        return super().forward(x * self.ones / self.num_calls)


@scenario(STAGES)
def test_a_block_changes_its_buffers(run: Run) -> None:
    model = run.wrap(Blocks(Counts(), Counts()))
    run.train(model, run.optimizer(model), steps=range(3))
    run.record(model.module.blocks[0].num_calls.double())


@scenario()
def test_a_block_without_gradients_changes_its_input(run: Run) -> None:
    def call(block: nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = h.clone()
            y = block(target)
        return block(h * 1) + y * target

    train_each(run, call, [mul_, relu_])
