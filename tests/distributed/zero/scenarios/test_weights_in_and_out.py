"""Weights that leave the model or enter it: state dictionaries, copies, files, averages, changes between steps."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import DEFAULT, GROUPS, HOST, STAGE_3, STAGES, WIDTH, Blocks, Run, mean_square, scenario
from zero.state.export import full_state_dict
from zero.units.hooks import no_hook


class WithBuffer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(2))
        self.head.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


def other_values() -> dict[str, Tensor]:
    """Return a state of `WithBuffer` with other values."""
    torch.manual_seed(7)
    return WithBuffer().state_dict()


def loss_of_copy(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - 0.5).square().mean()


@scenario(DEFAULT + HOST)
def test_the_first_rank_gets_the_full_state(run: Run) -> None:
    model, optimizer = run.start(WithBuffer())
    for step in range(2):
        run.train(model, optimizer, steps=[step])
        with model.gathered() as module:
            expected = {name: value.clone() for name, value in module.state_dict().items()}
        state = expected if run.is_plain else full_state_dict(model)
        if run.data.rank == 0:
            torch.testing.assert_close(state, expected, rtol=0, atol=0)
            WithBuffer().load_state_dict(state)
            assert not any(value.requires_grad for value in state.values())
        else:
            assert state == {} or run.is_plain


@scenario(DEFAULT + HOST)
def test_a_state_is_loaded_between_steps(run: Run) -> None:
    """All stages load it inside `gathered(modify=True)`, and those below 3 without it too."""
    model, optimizer = run.start(WithBuffer())
    run.train(model, optimizer)
    values = other_values()
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


@contextmanager
def swapped_on_conversion() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@scenario()
def test_a_state_that_replaces_parameters_is_refused(run: Run) -> None:
    model, optimizer = run.start(WithBuffer())
    run.train(model, optimizer)
    if not run.is_plain:
        with pytest.raises(ValueError, match="assign"):
            model.module.load_state_dict(other_values(), assign=True)
        with pytest.raises(ValueError, match="assign"), model.gathered(modify=True) as module:
            module.load_state_dict(other_values(), assign=True)
        with pytest.raises(ValueError, match=r"head\.weight .* swapped.*unwrap"), model.gathered() as module:
            torch.utils.swap_tensors(module.head.weight, nn.Parameter(torch.ones(2, 4)))
        with swapped_on_conversion():
            with pytest.raises(ValueError, match="set_swap_module"), model.gathered(modify=True) as module:
                module.load_state_dict(other_values())
            with pytest.raises(RuntimeError, match=r"swap Linear|unwrap"):
                model.module.head.float()
    run.train(model, optimizer, steps=[2])


@scenario()
def test_a_copy_of_the_module_is_plain_and_trains_by_itself(run: Run) -> None:
    model, optimizer = run.start(WithBuffer())
    run.train(model, optimizer)
    with model.gathered() as module:
        copied = copy.deepcopy(module)
    run.train(model, optimizer, steps=[2])
    plain_optimizer = torch.optim.SGD(copied.parameters(), lr=0.01)
    loss = loss_of_copy(copied, run.batch(5))
    loss.backward()
    plain_optimizer.step()
    assert all(param.grad is not None and param.isfinite().all() for param in copied.parameters())
    assert loss_of_copy(copied, run.batch(5)) < run.record(loss)
    run.train(model, optimizer, steps=[3])


@scenario()
def test_the_module_is_saved_and_loaded_as_a_file(run: Run) -> None:
    model, optimizer = run.start(WithBuffer())
    run.train(model, optimizer)
    whole, state = io.BytesIO(), io.BytesIO()
    with model.gathered() as module:
        torch.save(module, whole)
        torch.save(module.state_dict(), state)
    run.train(model, optimizer, steps=[2])
    loaded = WithBuffer()
    loaded.load_state_dict(torch.load(io.BytesIO(state.getvalue())))
    # In the first test process the class is known, so the pickle may be read.
    restored = torch.load(io.BytesIO(whole.getvalue()), weights_only=False)
    for copied in (loaded, restored):
        assert all(hook is no_hook for hook in copied._forward_pre_hooks.values())
        run.record(loss_of_copy(copied, run.batch(9)))


def replace_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


# Writes that every rank makes alike, without a gradient.
WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda module: [param.clamp_(-0.3, 0.3) for param in module.parameters()],
    "data": lambda module: [param.data.clamp_(-0.3, 0.3) for param in module.parameters()],
    "data, copied": lambda module: [param.data.copy_(param.data * 0.5) for param in module.parameters()],
    "data, replaced": replace_data,
    "detached": lambda module: [param.detach().mul_(0.5) for param in module.parameters()],
    "index": lambda module: module.head.weight.__setitem__(0, 0.25),
    "init": lambda module: nn.init.constant_(module.blocks[0].up.weight, 0.1),
    "vector": lambda module: nn.utils.vector_to_parameters(
        0.5 * nn.utils.parameters_to_vector(module.parameters()), module.parameters()
    ),
    "load_state_dict": lambda module: module.load_state_dict({n: 0.5 * v for n, v in module.state_dict().items()}),
    "apply": lambda module: module.apply(lambda part: isinstance(part, nn.Linear) and part.weight.mul_(0.5)),
}


@scenario(DEFAULT + HOST + GROUPS)
def test_writes_that_all_ranks_make_inside_gathered_are_kept(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step, write in enumerate(WRITES.values()):
        with torch.no_grad(), model.gathered() as module:
            write(module)
        run.train(model, optimizer, steps=[step])


@scenario(STAGES)
def test_of_writes_inside_gathered_with_modify_the_first_ranks_are_kept(run: Run) -> None:
    """A state that is loaded has a buffer, too."""
    model, optimizer = run.start(WithBuffer())
    for step, write in enumerate(WRITES.values()):
        with model.gathered(modify=True) as module:
            if run.is_plain or run.data.rank == 0:
                write(module)
        run.train(model, optimizer, steps=[step])


@scenario([configuration for configuration in DEFAULT + HOST if configuration.stage < 3])
def test_writes_between_steps_are_kept_below_stage_3(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step, write in enumerate(WRITES.values()):
        with torch.no_grad():
            write(model.module)
        run.train(model, optimizer, steps=[step])


@scenario(DEFAULT + HOST, dtype=torch.bfloat16, tolerance=0)
def test_writes_to_half_precision_weights_are_kept_by_the_next_step(run: Run) -> None:
    """The learning rate is zero: the steps publish what was written, bit for bit."""
    model, optimizer = run.start(Blocks(), lr=0.0)
    for step, write in enumerate(WRITES.values()):
        for modify in (False, True):
            with torch.no_grad(), model.gathered(modify=modify) as module:
                write(module)
            optimizer.zero_grad()
            mean_square(model, run.batch(step)).backward()
            optimizer.step()
    if not run.shards_parameters:
        with torch.no_grad():
            WRITES["data"](model.module)
        mean_square(model, run.batch(0)).backward()
        optimizer.step()


def copied(param: nn.Parameter) -> Tensor:
    return param.data.clone()


def referred_to(param: nn.Parameter) -> Tensor:
    return param.data


@scenario(DEFAULT + HOST)
def test_weights_are_replaced_for_a_forward_and_restored_before_its_backward(run: Run) -> None:
    """Binary weights, and noise on weights: the gradients are those of the replaced weights."""
    model, optimizer = run.start(Blocks())
    for step, keep in enumerate((copied, referred_to, copied)):
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


@scenario([configuration for configuration in DEFAULT + HOST if configuration.stage < 3])
def test_weights_are_replaced_and_restored_outside_of_gathered_below_stage_3(run: Run) -> None:
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


@scenario(DEFAULT + HOST)
def test_a_layer_replaces_its_weight_while_it_runs(run: Run) -> None:
    run.train_module(Blocks(Binary(WIDTH, WIDTH), nn.Sequential(Binary(WIDTH, WIDTH))), steps=range(3))


@scenario(STAGE_3)
def test_weights_that_are_resharded_between_forward_and_restoring_raise_in_backward(run: Run) -> None:
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
