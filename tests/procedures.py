"""Parts of the procedures of scenarios: modules that call a function, and ways to train, or to be refused."""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairwise import noting
from tests.scenarios import WIDTH, Block, Blocks, Loss, Model, Procedure, Run, mean_square

Make = Callable[[], nn.Module]
Act = Callable[[Run, Model], object]
REENTRANT = partial(checkpoint, use_reentrant=True)
NON_REENTRANT = partial(checkpoint, use_reentrant=False)


class With(nn.Module):
    """A module that computes `call(self, ...)` with these modules, parameters and attributes."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


class BlockWith(Block):
    """A block that computes `call(self, x)`."""

    def __init__(self, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def calling(call: Callable[[nn.Module, Tensor], Tensor], *blocks: nn.Module) -> nn.Module:
    """Return a model that calls each of its blocks by `call(block, h)`."""
    return With(
        lambda m, x: reduce(lambda h, block: call(block, h), m.blocks, m.embed(x)),
        embed=linear(),
        blocks=nn.ModuleList(blocks),
    )


def adapted() -> nn.Module:
    """Return a frozen layer with an adapter of low rank, which can be switched off."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return (m.base(x) + (x @ m.down.t() @ m.up.t() if m.adapts else 0)).tanh()

    return With(forward, base=linear().requires_grad_(False), down=param(2, WIDTH), up=param(WIDTH, 2), adapts=True)


def choosing() -> nn.Module:
    """Return a block that uses one of two parts, by its attribute `choice`."""
    return With(lambda m, x: x * m.scale.sin() if m.choice else m.block(x), block=Block(), scale=param(WIDTH))


def trains(*makes: Make, loss: Loss = mean_square, lr: float = 0.1, num_steps: int = 3) -> Procedure:
    """Train one module after the other."""

    def procedure(run: Run) -> None:
        for make in makes:
            run.train(*run.start(make(), lr=lr, momentum=0.9), loss, range(num_steps))

    return procedure


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


def trains_and(act: Callable[[Run, Model, int], object], make: Make = Blocks, num_steps: int = 3) -> Procedure:
    """Train a module, and do something before each step."""

    def procedure(run: Run) -> None:
        model, optimizer = run.start(make())
        for step in range(num_steps):
            act(run, model, step)
            run.train(model, optimizer, steps=[step])

    return procedure


def trains_parts(
    make: Make,
    loss: Callable[[Model, Tensor, int], Tensor],
    num_steps: int = 3,
    *,
    has_record: bool = True,
    **settings: Any,
) -> Procedure:
    """Train a module with a loss that depends on the rank, or is no mean over rows, in one process with all parts."""

    def procedure(run: Run) -> None:
        model = run.wrap(make(), **settings)
        optimizer = run.optimizer(model)
        for step in range(num_steps):
            optimizer.zero_grad()
            parts = run.parts(step)
            ranks = range(len(parts)) if run.is_plain else [run.data.rank]
            losses = []
            for rank, part in zip(ranks, parts, strict=True):
                losses.append(loss(model, part, rank) / len(parts))
                losses[-1].backward()
            run.record(sum(losses))
            optimizer.step()

    return procedure


def refuses(
    acts: Mapping[str, Act], match: str | None = None, error: Any = (RuntimeError, ValueError), make: Make = Blocks
) -> Procedure:
    """Train around acts that leave nothing but gradients, and raise an error that matches `match`, or their names."""

    def procedure(run: Run) -> None:
        model, optimizer = run.start(make())
        run.train(model, optimizer)
        for name, act in {} if run.is_plain else acts.items():
            with noting(name), pytest.raises(error, match=name if match is None else match):
                act(run, model)
            optimizer.zero_grad()
        run.train(model, optimizer, steps=[2])

    return procedure
