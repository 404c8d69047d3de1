"""Inputs and outputs of units and of the model: in every kind of container, and changed in place."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.procedures import BlockWith, With, calling, linear, param, trains
from tests.scenarios import WIDTH, Block, Blocks, Model, Procedure, Run, as_test, cases, mean_square


class Plain:
    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y


@dataclass(frozen=True)
class Record:
    x: Tensor
    y: Any


def of_attributes(container: Any) -> tuple[Tensor, Tensor]:
    return container.x, container.y


# A name, and how two tensors are put into a container and taken out of it again.
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), tuple),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda c: (c["x"], c["y"])),
    "nested dataclass": (lambda x, y: Record(Record(x, x), [(y,)]), lambda c: (c.x.x, c.y[0][0])),
    "nested lists": (lambda x, y: [[x], {"y": [(y, None)]}], lambda c: (c[0][0], c[1]["y"][0][0])),
    "slots": (Slotted, of_attributes),
    "deque": (lambda x, y: deque([x, y]), tuple),
    "class in a tuple": (lambda x, y: (Plain(x, x), [Plain(y, y)]), lambda c: (c[0].x, c[1][0].y)),
    "closure": (lambda x, y: lambda: (x, y), lambda c: c()),
    "iterator": (lambda x, y: iter([x, y]), tuple),
    "generator": (lambda x, y: (value for value in (x, y)), tuple),
}


def packing() -> nn.Module:
    """Return a block whose input and output are in a container of the kind `kind`."""

    def forward(m: nn.Module, inputs: Any) -> Any:
        pack, unpack = CONTAINERS[m.kind]
        x, y = unpack(inputs)
        return pack(m.first(x).tanh() * m.scale, m.second(y * m.scale) + x)

    return With(forward, first=linear(), second=linear(), scale=param(WIDTH), kind="tuple")


def pass_on(m: nn.Module, x: Tensor) -> Tensor:
    pack, unpack = CONTAINERS[m.kind]
    packed = pack(x, x)
    for block in m.blocks:
        packed = block(packed)
    x, y = unpack(packed)
    return x * y


def loss_of_container(kind: str, model: Model, x: Tensor) -> Tensor:
    pack, unpack = CONTAINERS[kind]
    x, y = unpack(model(pack(x, x.cos())))
    return (x * y).square().mean()


def containers(is_model: bool, run: Run) -> None:
    blocks = nn.ModuleList(packing() for _ in range(3))
    model, optimizer = run.start(packing() if is_model else With(pass_on, blocks=blocks), lr=0.02)
    for step, kind in enumerate(kind for kind in CONTAINERS for _ in range(2)):
        for part in model.module.modules():
            part.kind = kind
        loss = partial(loss_of_container, kind) if is_model else lambda model, x: model(x).square().mean()
        run.train(model, optimizer, loss, steps=[step])


def yield_layers(m: nn.Module, x: Tensor) -> Iterator[Tensor]:
    for layer in m.layers:
        x = layer(x).tanh()
        yield x


def yields_layers() -> nn.Module:
    """Return a block whose forward is a generator: its layers run when the caller iterates."""
    return With(yield_layers, layers=nn.Sequential(linear(), linear()))


def yield_products(m: nn.Module, x: Tensor) -> Iterator[Tensor]:
    yield x @ m.weight
    yield x * m.bias


def yields_products() -> nn.Module:
    """Return a block whose generator reads the block's own parameters when the caller iterates."""
    return With(yield_products, weight=param(WIDTH, WIDTH), bias=param(WIDTH))


def sum_of(block: nn.Module, h: Tensor) -> Tensor:
    return sum(block(h)).tanh()


def returns_function() -> nn.Module:
    """Return a block that returns a function which computes with its parameters later."""

    def forward(m: nn.Module, x: Tensor) -> Callable[[], Tensor]:
        weight = m.linear.weight
        return lambda: m.linear(x).tanh() @ weight

    return With(forward, linear=linear())


def write_to_cache(m: nn.Module, x: Tensor, *, cache: dict[str, Any]) -> None:
    """Hand a tensor on in a container of the caller, and one in an attribute of the module."""
    m.last = m.linear(x).tanh()
    cache.setdefault("all", []).append(m.last * m.linear.bias)


def writing_to_cache() -> nn.Module:
    return With(write_to_cache, linear=linear())


def read_cache(m: nn.Module, x: Tensor) -> Tensor:
    cache: dict[str, Any] = {}
    for block in m.blocks:
        block(x, cache=cache)
        x = block.last
    return x + sum(cache["all"])


def gradients_of_inputs(run: Run) -> None:
    """Adversarial training and style transfer need them, and so does a model in front of this one."""
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        x = run.batch(step).requires_grad_()
        run.record(mean_square(model, x)).backward()
        run.record((x.grad * len(x)).square().mean())  # the factor makes it independent of the number of rows
        optimizer.step()


def add_(x: Tensor) -> None:
    x += 1


def view_(x: Tensor) -> None:
    x.view(-1, 2)[:, 1:].sin_()


CHANGES: list[Callable[[Tensor], object]] = [lambda x: x.mul_(2), add_, view_]


def changing() -> nn.Module:
    """Return a block that changes its input in place, then computes with it."""

    def forward(block: Block, x: Tensor) -> Tensor:
        block.change(x)
        return block.mlp(x)

    return BlockWith(forward)


def changes_inputs(call: Callable[[nn.Module, Tensor], Tensor]) -> Procedure:
    def procedure(run: Run) -> None:
        model, optimizer = run.start(calling(call, changing(), changing()))
        for step, change in enumerate(change for change in CHANGES for _ in range(2)):
            for block in model.module.blocks:
                block.change = change
            run.train(model, optimizer, steps=[step])

    return procedure


def read_the_input_afterwards(block: nn.Module, h: Tensor) -> Tensor:
    h = h * 1
    y = block(h)
    return (y + h * h).tanh()


def the_model_changes_its_input(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        changed, constant = x * torch.ones(WIDTH, requires_grad=True), x.clone()
        y = model(changed) + model(constant)
        return (y + changed * changed + constant).tanh().square().mean()

    model, optimizer = run.start(changing())
    for step, change in enumerate(change for change in CHANGES for _ in range(2)):
        model.module.change = change
        run.train(model, optimizer, loss, steps=[step])


def change_the_output(block: nn.Module, h: Tensor) -> Tensor:
    y = block(h)
    y *= 0.5
    y[:, 0] = h[:, 1]
    y += h
    return y


# Blocks that return their input, changed, or a view of it.
RETURNS: list[Callable[[nn.Module, Tensor], Tensor]] = [
    lambda m, x: x.add_(m.linear(x.clone())),
    lambda m, x: torch.cat([x, m.linear(x)], dim=1)[:, 2 : WIDTH + 2],
    lambda _, x: x.view(-1, WIDTH)[:, :],
    lambda _, x: x,
]


def returning(way: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    blocks = With(way, linear=linear()), Block(), With(way, linear=linear()), With(RETURNS[0], linear=linear())
    return calling(lambda block, h: block(h * 1), *blocks)


TABLE = {
    "containers": cases(
        {
            "of blocks": partial(containers, False),
            "of the model": partial(containers, True),
            "generators": trains(
                *(lambda make=make: calling(sum_of, make(), make()) for make in (yields_layers, yields_products))
            ),
            "a model that is a generator": trains(yields_layers, loss=lambda model, x: sum(model(x)).square().mean()),
            "a returned function": trains(
                lambda: calling(lambda block, h: block(h)(), *(returns_function() for _ in range(3)))
            ),
            "a cache": trains(lambda: With(read_cache, blocks=nn.ModuleList(writing_to_cache() for _ in range(3)))),
        },
        gradients_of_inputs,
    ),
    "in-place": cases(
        {
            "the caller reads a changed input": changes_inputs(read_the_input_afterwards),
            "outputs of blocks and of the model": trains(
                lambda: calling(change_the_output, Block(), Block()),
                loss=lambda model, x: model(x).sub_(0.5).pow_(2).mean(),
            ),
            "a returned input": trains(*(partial(returning, way) for way in RETURNS)),
        },
        the_model_changes_its_input,
    ),
}

test_scenario = as_test(__name__, TABLE)
