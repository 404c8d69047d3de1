"""Scenarios that users of FSDP2, DeepSpeed and other libraries have reported there as errors or wrong values.

A module of tests has them in a table: `repository#number` of a thread, and what it is about, with a procedure. All of
them run on the same ranks, and each is compared by itself.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.scenarios import ALL, STAGES, TOLERANCE, WIDTH, Blocks, Loss, Model, Procedure, Run, as_test, mean_square

Make = Callable[[], nn.Module]
Table = dict[str, Procedure]


def as_one_test(module_name: str, table: Table) -> Callable[..., None]:
    """Make a test of a table; by default in the stages whose hooks on modules differ, with `-m full` in all ways."""
    return as_test(partial(row_of, module_name), list(table), STAGES[1::2], ALL, TOLERANCE, torch.float64)


def row_of(module_name: str, name: str) -> Procedure:
    return importlib.import_module(module_name).TABLE[name]


def trains(make: Make, loss: Loss = mean_square) -> Procedure:
    """Train a module."""
    return lambda run: run.train_module(make(), loss, steps=range(3))


def trains_by(make: Make, backward: Callable[[Model, Tensor], object], **settings: Any) -> Procedure:
    """Train a module with a backward that may be several; `settings` are those of ZeroConfig."""

    def procedure(run: Run) -> None:
        model = run.wrap(make(), **settings)
        optimizer = run.optimizer(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, run.batch(step))
            optimizer.step()

    return procedure


def trains_and(act: Callable[[Run, Model, int], object], make: Make = Blocks) -> Procedure:
    """Train a module, and do something before each step."""

    def procedure(run: Run) -> None:
        model, optimizer = run.start(make())
        for step in range(3):
            act(run, model, step)
            run.train(model, optimizer, steps=[step])

    return procedure


def trains_parts(make: Make, loss: Callable[[Model, Tensor, int], Tensor]) -> Procedure:
    """Train a module with a loss that depends on the rank, in one process with the parts of all ranks."""

    def procedure(run: Run) -> None:
        model, optimizer = run.start(make())
        for step in range(3):
            optimizer.zero_grad()
            parts = run.parts(step)
            ranks = range(len(parts)) if run.is_plain else [run.data.rank]
            losses = [loss(model, part, rank) / len(parts) for rank, part in zip(ranks, parts, strict=True)]
            run.record(sum(losses)).backward()
            optimizer.step()

    return procedure


class With(nn.Module):
    """A module that computes `call(self, x)` with these modules, parameters and attributes."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def adapted() -> nn.Module:
    """Return a frozen layer with an adapter of low rank, which can be switched off."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return (m.base(x) + (x @ m.down.t() @ m.up.t() if m.adapts else 0)).tanh()

    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return With(forward, base=base, down=param(2, WIDTH), up=param(WIDTH, 2), adapts=True)
