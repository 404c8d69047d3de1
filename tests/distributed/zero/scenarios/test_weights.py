"""Weights that leave the model or enter it: losses that read them, states, copies, files, changes between steps."""

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.procedures import BlockWith, With, trains, trains_by
from tests.scenarios import Block, Blocks, Model, Run, as_test, cases, mean_square
from zero.core.units.hooks import no_hook


def add_offset(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(x) + m.offset


def with_buffer() -> nn.Module:
    """Return a model with a buffer, and with a parameter that was replaced."""
    module = With(add_offset, body=Blocks())
    module.register_buffer("offset", torch.randn(2))
    module.body.head.weight = nn.Parameter(torch.randn(2, 4))
    return module


def a_state_is_loaded_between_steps(run: Run) -> None:
    """All stages load it inside `gathered(modify=True)`, and those below 3 without it too."""
    model, optimizer = run.start(with_buffer())
    run.train(model, optimizer)
    values = with_buffer().state_dict()
    with model.gathered(modify=True) as module:
        module.load_state_dict(values)
    run.train(model, optimizer, steps=[2, 3])
    if not run.shards_parameters:
        model.module.load_state_dict(values)
    else:
        with pytest.raises(RuntimeError, match="gathered"):
            model.module.load_state_dict(values)
        with model.gathered(modify=True) as module:
            module.load_state_dict(values)
    run.train(model, optimizer, steps=[4])


def copies_and_files(run: Run) -> None:
    """A copy of the module is plain and trains by itself; the module and its state are saved and loaded."""
    model, optimizer = run.start(with_buffer())
    run.train(model, optimizer)
    whole, state = io.BytesIO(), io.BytesIO()
    with model.gathered() as module:
        copied = copy.deepcopy(module)
        torch.save(module, whole)
        torch.save(module.state_dict(), state)
    run.train(model, optimizer, steps=[2])
    loaded = with_buffer()
    loaded.load_state_dict(torch.load(io.BytesIO(state.getvalue())))
    # In the first test process the class is known, so the pickle may be read.
    restored = torch.load(io.BytesIO(whole.getvalue()), weights_only=False)
    for other in (copied, loaded, restored):
        assert all(hook is no_hook for hook in other._forward_pre_hooks.values())
        run.record(mean_square(other, run.batch(9))).backward()
        assert all(param.grad is not None and param.isfinite().all() for param in other.parameters())
    torch.optim.SGD(copied.parameters(), lr=0.01).step()
    run.train(model, optimizer, steps=[3])


def replace_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


# Writes that every rank makes alike, without a gradient.
WRITES: list[Callable[[nn.Module], object]] = [
    lambda module: [param.clamp_(-0.3, 0.3) for param in module.parameters()],
    lambda module: [param.data.clamp_(-0.3, 0.3) for param in module.parameters()],
    replace_data,
    lambda module: [param.detach().mul_(0.5) for param in module.parameters()],
    lambda module: module.head.weight.__setitem__(0, 0.25),
    lambda module: nn.init.constant_(module.blocks[0].up.weight, 0.1),
    lambda module: nn.utils.vector_to_parameters(
        0.5 * nn.utils.parameters_to_vector(module.parameters()), module.parameters()
    ),
    lambda module: module.load_state_dict({name: 0.5 * value for name, value in module.state_dict().items()}),
]


def writes(way: Callable[[Model], AbstractContextManager[nn.Module]], run: Run) -> None:
    """Every write lasts; of `gathered(modify=True)` that of the first rank."""
    model, optimizer = run.start(Blocks())
    for step, write in enumerate(WRITES):
        with torch.no_grad(), way(model) as module:
            write(module)
        run.train(model, optimizer, steps=[step])


def first_rank_writes(run: Run) -> None:
    model, optimizer = run.start(with_buffer())
    for step, write in enumerate(WRITES):
        with model.gathered(modify=True) as module:
            if run.is_plain or run.data.rank == 0:
                write(module.body)
                module.offset.mul_(0.5)
        run.train(model, optimizer, steps=[step])


def writes_to_half_precision_weights(run: Run) -> None:
    """The learning rate is zero: the steps publish what was written, bit for bit."""
    model, optimizer = run.start(Blocks(), lr=0.0)
    for step, write in enumerate(WRITES):
        for modify in (False, True):
            with torch.no_grad(), model.gathered(modify=modify) as module:
                write(module)
            run.train(model, optimizer, lambda model, x: model(x).square().mean(), [step])
    run.recorded.clear()  # the losses are of other rows
    if not run.shards_parameters:
        with torch.no_grad():
            WRITES[1](model.module)
        mean_square(model, run.batch(0)).backward()
        optimizer.step()


KEEPS: list[Callable[[nn.Parameter], Tensor]] = [lambda p: p.data.clone(), lambda p: p.data, lambda p: p.data.clone()]


def weights_are_replaced_for_a_forward(run: Run) -> None:
    """They are restored before its backward (binary weights, noise): the gradients are those of the replaced ones."""
    model, optimizer = run.start(Blocks())
    for step, keep in enumerate(KEEPS):
        optimizer.zero_grad()
        with model.gathered() as module:
            kept = [keep(param) for param in module.parameters()]
            for param in module.parameters():
                param.data = 0.1 * param.data.sign()
            loss = run.record(mean_square(model, run.batch(step)))
            for param, values in zip(module.parameters(), kept, strict=True):
                param.data = values
            loss.backward()
        optimizer.step()


def weights_are_replaced_outside_of_gathered(run: Run) -> None:
    module = Blocks()
    module.embed.requires_grad_(False)
    model, optimizer = run.start(module)
    weights = [param for param in module.parameters() if param.dim() == 2]
    for step in range(3):
        optimizer.zero_grad()
        kept = [param.data for param in weights]
        for param in weights:
            param.data = param.data + 0.01 * step
        loss = run.record(mean_square(model, run.batch(step)))
        for param, values in zip(weights, kept, strict=True):
            param.data = values
        loss.backward()
        optimizer.step()
        weights[1].data, weights[3].data = weights[3].data, weights[1].data  # of one shape, in two units
        run.train(model, optimizer, steps=[10 + step])


class Binary(nn.Linear):
    """A layer that replaces its weight in forward only."""

    def forward(self, x: Tensor) -> Tensor:
        kept, self.weight.data = self.weight.data, 0.1 * self.weight.data.sign()
        output = super().forward(x)
        self.weight.data = kept
        return output


def resharded_between_replacing_and_restoring(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    if not run.is_plain:
        weight = model.module.blocks[0].up.weight
        with model.gathered():
            kept = weight.data.clone()
            weight.data = kept.sign()
        loss = mean_square(model, run.batch(0))
        with model.gathered():
            weight.data = kept
        with pytest.raises(RuntimeError, match=r"modified"):
            loss.backward()
        optimizer.zero_grad()
    run.train(model, optimizer)


def limit(block: Block, x: Tensor) -> Tensor:
    """Write to parameters in forward."""
    block.scale.data.clamp_(-0.5, 0.5)
    with torch.no_grad():
        block.down.bias.clamp_(max=0.1)
    return x + block.mlp(x)


def penalty(module: nn.Module) -> Tensor:
    return sum(param.square().sum() for param in module.parameters()) * 0.1


def a_regulariser_with_a_backward_of_its_own(model: Model, x: Tensor) -> None:
    with model.accumulate():
        mean_square(model, x).backward()
    with model.gathered() as module:
        value = penalty(module)
    value.backward()


def a_read_that_is_used_after_another_step(run: Run) -> None:
    """The values of a parameter that leave `gathered` belong to this step."""
    model, optimizer = run.start(Blocks())
    with model.gathered() as module:
        values = penalty(module)
    run.train(model, optimizer)
    with pytest.raises(RuntimeError):
        values.backward()
    optimizer.zero_grad()
    run.train(model, optimizer, steps=[2])


def read_before_backward(model: Model, x: Tensor) -> Tensor:
    loss = mean_square(model, x)
    with torch.no_grad(), model.gathered() as module:
        total = sum(value.double().sum() for value in module.state_dict().values())
    return loss * total.sin()


def evaluation_without_an_optimizer(run: Run) -> None:
    model = run.wrap(Blocks())
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            value = mean_square(model.eval(), run.batch(9))
        run.record(value)
        with model.gathered([model.module.head.weight]) as module:
            run.record(module.head.weight)
    run.train(model.train(), run.optimizer(model))


TABLE = {
    "losses-of-weights": cases(
        {
            "a regulariser": trains_by(Blocks, a_regulariser_with_a_backward_of_its_own),
            "pytorch#131965: a read before backward": trains(Blocks, loss=read_before_backward),
        }
    )
    | cases(a_read_that_is_used_after_another_step, stages=[3]),
    "states-and-copies": cases(
        a_state_is_loaded_between_steps,
        copies_and_files,
        {"transformers#48841, pytorch#144289: evaluation without an optimizer": evaluation_without_an_optimizer},
    ),
    "writes": cases(
        first_rank_writes,
        {
            "of all ranks inside gathered": partial(writes, lambda model: model.gathered()),
            "ICML2024-OT-CLIP#5: in forward": trains(lambda: Blocks(BlockWith(limit), BlockWith(limit))),
        },
    )
    | cases({"between steps": partial(writes, lambda model: nullcontext(model.module))}, stages=[0, 1, 2]),
    "half-precision-writes": cases(writes_to_half_precision_weights, dtype=torch.bfloat16, tolerance=0),
    "replaced-weights": cases(
        weights_are_replaced_for_a_forward,
        {"in a layer's forward": trains(lambda: Blocks(Binary(4, 4), nn.Sequential(Binary(4, 4))))},
    )
    | cases(weights_are_replaced_outside_of_gathered, stages=[0, 1, 2])
    | cases(resharded_between_replacing_and_restoring, stages=[3]),
}

test_scenario = as_test(__name__, TABLE)
