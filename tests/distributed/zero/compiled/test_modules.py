"""Modules that torch.compile has compiled, whole or in parts, before or after they are wrapped."""

from contextlib import nullcontext
from functools import wraps

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.zero.compiled.backend import Backend
from tests.scenarios import WIDTH, Block, Blocks, Configuration, Model, Procedure, Run, as_test, cases
from tests.twins import ALL_STAGES
from zero import ZeroConfig, ZeroDataParallel, ZeroOptimizer

BLOCK_OPERATIONS = 5  # x * scale, up, tanh, down, +


def compiled(procedure: Procedure) -> Procedure:
    """Return a procedure whose compiled parts run eager in one process."""

    @wraps(procedure)
    def run_procedure(run: Run) -> None:
        with torch.compiler.set_stance("force_eager") if run.is_plain else nullcontext():
            procedure(run)

    return run_procedure


def three_blocks() -> Blocks:
    return Blocks(*(Block() for _ in range(3)))


@compiled
def blocks_before_or_after_wrapping_or_their_forward_alone(run: Run) -> None:
    for way in ("before", "after", "forward"):
        module, backend = three_blocks(), Backend()
        if way == "before":
            backend.compile_blocks(module)
        model, optimizer = run.start(module)
        if way == "after":
            run.train(model, optimizer, steps=[9])
            backend.compile_blocks(module)
        for block in module.blocks if way == "forward" else ():
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        run.train(model, optimizer, steps=range(3))
        # One graph for all blocks and all steps.
        assert run.is_plain or backend.num_operations == [BLOCK_OPERATIONS], way


@compiled
def a_whole_model(run: Run) -> None:
    module, backend = three_blocks(), Backend()
    module.head = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))
    module.compile(backend=backend)
    model = run.wrap(module)
    run.train(model, run.optimizer(model), steps=range(3))
    # In stage 3, graphs end at blocks, which have one graph together, and not between the other modules.
    expected = [1, BLOCK_OPERATIONS, 2] if run.shards_parameters else [3 * BLOCK_OPERATIONS + 3]
    assert run.is_plain or backend.num_operations == expected


def test_models_of_one_process_share_compiled_code():
    """Torch compiles a function 8 times, and runs it as it is from then on."""
    backend = Backend()
    for stage in ALL_STAGES * 3:
        module = three_blocks()
        backend.compile_blocks(module)
        model = ZeroDataParallel(module, None, ZeroConfig(stage))
        optimizer = ZeroOptimizer(model, torch.optim.SGD)
        model(torch.ones(3, WIDTH)).sum().backward()
        optimizer.step()
    assert backend.num_operations == [BLOCK_OPERATIONS] * 2  # parameters that persist, and transient ones


@compiled
def the_wrapper(run: Run) -> None:
    model, backend = run.wrap(three_blocks()), Backend()
    optimizer = run.optimizer(model)
    model.compile(backend=backend)
    run.train(model, optimizer, steps=range(2))
    run.train(torch.compile(model, backend=backend), optimizer, steps=range(2, 4))


@compiled
def a_part_that_runs_by_itself(run: Run) -> None:
    model, backend = run.wrap(three_blocks()), Backend()
    model.module.embed.compile(backend=backend)
    model.module.blocks[0].up.compile(backend=backend)

    def loss(model: Model, x: Tensor) -> Tensor:
        alone = model.module.head(model.module.embed(x)).square().mean()
        return alone + model.module.blocks[0].up(x).square().mean() + (model(x) - 0.5).square().mean()

    run.train(model, run.optimizer(model), loss, steps=range(3))


class Borrower(Blocks):
    """A model whose blocks and which itself read weights of other blocks."""

    class Block(Block):
        def __init__(self, other: Block) -> None:
            super().__init__()
            self.others = [other]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x @ self.others[0].up.weight.t()).sum(-1, keepdim=True)

    def __init__(self) -> None:
        first = Block()
        super().__init__(first, Borrower.Block(first), Block())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.blocks[2].scale)


@compiled
def a_module_that_reads_weights_of_another(run: Run) -> None:
    module, backend = Borrower(), Backend()
    backend.compile_blocks(module)
    module.compile(backend=backend)
    run.train_module(module, steps=range(3))


class Fails(Block):
    """A block that raises if its input is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        if x.isnan().any():
            raise FloatingPointError
        return super().forward(x)


@compiled
def a_module_that_raises_and_runs_again(run: Run) -> None:
    model, backend = run.wrap(Blocks(Block(), Fails(), Block())), Backend()
    backend.compile_blocks(model.module)
    optimizer = run.optimizer(model)
    run.train(model, optimizer)
    with pytest.raises(FloatingPointError):
        model(torch.full((2, WIDTH), torch.nan))
    run.train(model, optimizer)


TABLE = {
    "compiled": cases(
        blocks_before_or_after_wrapping_or_their_forward_alone, few=[Configuration(0, offloads=True), Configuration(3)]
    )
    | cases(a_whole_model, the_wrapper, a_module_that_raises_and_runs_again, few=[Configuration(3)])
    | cases(a_part_that_runs_by_itself, a_module_that_reads_weights_of_another, stages=[3], few=[Configuration(3)])
}

test_scenario = as_test(__name__, TABLE)
