"""Inputs and outputs of units and of the model, in every kind of container."""

import itertools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.scenarios import STAGE_3, STAGES, WIDTH, Blocks, Model, Run, scenario

Pair = namedtuple("Pair", ["x", "y"])


class Plain:
    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y


@dataclass
class Record:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Nested:
    record: Record
    others: list[Any]


def of_attributes(container: Any) -> tuple[Tensor, Tensor]:
    return container.x, container.y


# A name, and how two tensors are put into a container and taken out of it again.
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), tuple),
    "list": (lambda x, y: [x, y], tuple),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda c: (c["x"], c["y"])),
    "namedtuple": (Pair, tuple),
    "dataclass": (Record, of_attributes),
    "nested dataclass": (lambda x, y: Nested(Record(x, x), [(y,)]), lambda c: (c.record.x, c.others[0][0])),
    "nested lists": (lambda x, y: [[x], {"y": [(y, None)]}], lambda c: (c[0][0], c[1]["y"][0][0])),
    "ordered dict": (lambda x, y: OrderedDict(x=x, y=y), lambda c: (c["x"], c["y"])),
    "class": (Plain, of_attributes),
    "slots": (Slotted, of_attributes),
    "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), of_attributes),
    "user dict": (lambda x, y: UserDict(x=x, y=y), lambda c: (c["x"], c["y"])),
    "deque": (lambda x, y: deque([x, y]), tuple),
    "class in a tuple": (lambda x, y: (Plain(x, x), [Plain(y, y)]), lambda c: (c[0].x, c[1][0].y)),
    "closure": (lambda x, y: lambda: (x, y), lambda c: c()),
    "iterator": (lambda x, y: iter([x, y]), tuple),
    "generator": (lambda x, y: (value for value in (x, y)), tuple),
    "map": (lambda x, y: map(torch.sin, (x, y)), tuple),
}


class Packs(nn.Module):
    """A block whose input or output, or both, are in a container of the kind `kind`."""

    def __init__(self, packs_input: bool, packs_output: bool) -> None:
        super().__init__()
        self.packs_input, self.packs_output, self.kind = packs_input, packs_output, "tuple"
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Any) -> Any:
        pack, unpack = CONTAINERS[self.kind]
        x, y = unpack(inputs) if self.packs_input else inputs
        x, y = self.first(x).tanh() * self.scale, self.second(y * self.scale) + x
        return pack(x, y) if self.packs_output else (x, y)


class PacksBetweenBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Packs(*packs) for packs in ((False, True), (True, False), (False, True), (True, True))
        )

    def forward(self, x: Tensor) -> Tensor:
        pack, unpack = CONTAINERS[self.blocks[0].kind]
        pair = unpack(self.blocks[0]((x, x)))
        pair = self.blocks[1](pack(*pair))
        pair = unpack(self.blocks[2](pair))
        x, y = unpack(self.blocks[3](pack(*pair)))
        return x * y


def train_with_each_kind(run: Run, module: nn.Module, loss: Callable[[str, Model, Tensor], Tensor]) -> None:
    model, optimizer = run.start(module, lr=0.02)
    for step, kind in enumerate(kind for kind in CONTAINERS for _ in range(2)):
        for part in module.modules():
            part.kind = kind
        run.train(model, optimizer, partial(loss, kind), steps=[step])


@scenario()
def test_blocks_take_and_return_tensors_in_any_container(run: Run) -> None:
    train_with_each_kind(run, PacksBetweenBlocks(), lambda _kind, model, x: model(x).square().mean())


@scenario()
def test_the_model_takes_and_returns_tensors_in_any_container(run: Run) -> None:
    def loss(kind: str, model: Model, x: Tensor) -> Tensor:
        pack, unpack = CONTAINERS[kind]
        x, y = unpack(model(pack(x, x.cos())))
        return (x * y).square().mean()

    train_with_each_kind(run, Packs(packs_input=True, packs_output=True), loss)


class YieldsLayers(nn.Module):
    """A block whose forward is a generator: its layers run when the caller iterates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
            yield x


class YieldsProducts(nn.Module):
    """A block whose generator reads the block's own parameters when the caller iterates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x @ self.weight
        yield x * self.bias


class Iterates(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = sum(block(x)).tanh()
        return x


@scenario(STAGES)
def test_a_generator_runs_layers_or_reads_parameters_while_its_caller_iterates(run: Run) -> None:
    for make in (YieldsLayers, YieldsProducts):
        run.train_module(Iterates(make))
        run.train_module(make(), lambda model, x: sum(model(x)).square().mean())


class ReturnsFunction(nn.Module):
    """A block that returns a function which computes with its parameters later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        weight = self.linear.weight
        return lambda: self.linear(x).tanh() @ weight


class Calls(Iterates):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)()
        return x


@scenario()
def test_a_returned_function_computes_with_parameters_later(run: Run) -> None:
    run.train_module(Calls(ReturnsFunction), steps=range(3))


class WritesToCache(nn.Module):
    """A block that hands a tensor on in a container that its caller gave it, and in an attribute of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor, *, cache: dict[str, Any]) -> None:
        self.last = self.linear(x).tanh()
        cache.setdefault("all", []).append(self.last * self.linear.bias)


class ReadsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritesToCache() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[str, Any] = {}
        for block in self.blocks:
            block(x, cache=cache)
            x = block.last
        return x + sum(cache["all"])


@scenario()
def test_blocks_return_nothing_and_write_to_a_cache(run: Run) -> None:
    run.train_module(ReadsCache(), steps=range(3))


class Multitask(Blocks):
    """Returns outputs of which the loss uses some, and others only in some steps."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.encode(x)
        hidden = hidden if mask is None else hidden * mask
        return {"hidden": hidden, "head": self.head(hidden) * scale, "name": "multitask", "none": None}


@scenario()
def test_the_loss_uses_other_outputs_from_step_to_step(run: Run) -> None:
    model, optimizer = run.start(Multitask())
    for step, key in enumerate(("hidden", "head", "hidden", "head")):
        mask = torch.ones(WIDTH) if step % 2 else None
        run.train(model, optimizer, lambda m, x, k=key, mask=mask: m(x, mask=mask)[k].square().mean(), steps=[step])


@scenario(STAGE_3)
def test_inputs_that_need_gradients_get_them(run: Run) -> None:
    """Adversarial training and style transfer need them, and so does a model in front of this one."""
    model, optimizer = run.start(Blocks())
    for step, as_object in itertools.product(range(2), (False, True)):
        optimizer.zero_grad()
        x = run.batch(step).requires_grad_()
        # The factor makes the gradient of a row independent of the number of rows.
        loss = model(Plain(x, x).x if as_object else x).square().mean()
        loss.backward()
        run.record(loss)
        run.record((x.grad * len(x)).square().mean())
        optimizer.step()
