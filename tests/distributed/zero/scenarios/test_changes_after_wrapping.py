"""Changes of a module that is already wrapped: each is trained, or raises, or causes a warning that names it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel.validation.errors import ConfigError
from tests.scenarios import DEFAULT, HOST, STAGE_3, WIDTH, Block, Blocks, Model, Run, mean_square, scenario

CASTS: dict[str, Callable[[Model], object]] = {
    "float": lambda model: model.float(),
    "half": lambda model: model.module.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to a dtype": lambda model: model.to(torch.float32),
    "a block": lambda model: model.module.blocks[0].to(torch.float32),
    "to a device": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
}


@scenario()
def test_a_cast_or_a_move_after_wrapping_raises(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    for cast in () if run.is_plain else CASTS.values():
        with pytest.raises((RuntimeError, ValueError), match=r"unwrap|before .*wrap"):
            cast(model)
    run.train(model, optimizer, steps=[2])


@scenario()
def test_a_cast_or_a_move_that_changes_nothing_is_accepted(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step, move in enumerate(
        (lambda m: m.to("cpu"), lambda m: m.double(), lambda m: m.to(torch.float64), nn.Module.cpu)
    ):
        move(model)
        move(model.module)
        run.train(model, optimizer, steps=[step])


@scenario()
def test_freezing_after_wrapping_raises_in_the_step(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    for chosen in () if run.is_plain else (model.module.head, model.module.blocks, model.module):
        chosen.requires_grad_(False)
        with pytest.raises((RuntimeError, ValueError), match="unwrap"):  # noqa: PT012
            loss = mean_square(model, run.batch(2))
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        chosen.requires_grad_(True)
        optimizer.zero_grad()
    run.train(model, optimizer, steps=[3])


@scenario()
def test_unfreezing_after_wrapping_raises_in_the_step(run: Run) -> None:
    module = Blocks()
    module.blocks.requires_grad_(False)
    model, optimizer = run.start(module)
    run.train(model, optimizer)
    if not run.is_plain:
        module.blocks[1].requires_grad_(True)
        with pytest.raises((RuntimeError, ValueError), match=r"blocks\.1.*unwrap"):  # noqa: PT012
            mean_square(model, run.batch(2)).backward()
            optimizer.step()
        module.blocks[1].requires_grad_(False)
        optimizer.zero_grad()
    run.train(model, optimizer, steps=[3])


@scenario(DEFAULT + HOST)
def test_layers_are_unfrozen_one_after_another(run: Run) -> None:
    """Unwrap, change and wrap again, with a new optimizer as in plain torch."""
    module = Blocks()
    module.requires_grad_(False)
    for step, thawed in enumerate((module.head, module.blocks[1], module.blocks[0], module.embed)):
        thawed.requires_grad_(True)
        model = run.wrap(module)
        run.train(model, run.optimizer(model), steps=[2 * step, 2 * step + 1])
        module = model.unwrap()
        for param in module.parameters():
            run.record(param)
            assert param.grad is None or run.is_plain
            assert type(param) is nn.Parameter
        run.record(mean_square(module, run.batch(50)))
    run.train_module(module, steps=[9])


@scenario()
def test_an_unwrapped_module_is_plain_and_complete(run: Run) -> None:
    module = Blocks()
    module.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    model = run.wrap(module)
    run.train(model, run.optimizer(model))
    plain = model.unwrap()
    assert plain is module
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (plain(run.batch(2)) - 0.5).square().mean().backward()
    assert all(param.grad is not None and param.isfinite().all() for param in plain.parameters())
    optimizer.zero_grad()
    plain.double().requires_grad_(False).requires_grad_(True)
    plain.load_state_dict(plain.state_dict(), assign=True)
    run.train_module(plain)


@scenario()
def test_wrapping_twice_is_refused(run: Run) -> None:
    module = Blocks()
    model = run.wrap(module)
    if not run.is_plain:
        for again in (module, module.blocks[0], model, nn.Sequential(module)):
            with pytest.raises((ConfigError, ValueError), match="unwrap"):
                type(model)(again, run.data, run.configuration.zero)
    run.train(model, run.optimizer(model))


@scenario()
def test_layers_added_and_replaced_after_wrapping_run_and_a_warning_names_them(run: Run) -> None:
    class WithAdapter(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.adapter(x) if hasattr(self, "adapter") else x)

    model, optimizer = run.start(WithAdapter())
    run.train(model, optimizer)
    torch.manual_seed(3)
    kept, model.module.blocks[1], model.module.adapter = model.module.blocks[1], Block(), nn.Linear(WIDTH, WIDTH)
    if run.is_plain:
        run.train(model, optimizer, steps=[2])
    else:
        with pytest.warns(UserWarning, match=r"adapter\.weight"), pytest.warns(UserWarning, match=r"blocks\.1\."):
            run.train(model, optimizer, steps=[2])
    model.module.blocks[1] = kept
    del model.module.adapter


@scenario(STAGE_3)
def test_a_block_removed_after_wrapping_is_not_trained(run: Run) -> None:
    """Layer dropping: the parameters of the block have a gradient of zero."""
    model, optimizer = run.start(Blocks(Block(), Block(), Block()))
    run.train(model, optimizer)
    blocks = model.module.blocks
    model.module.blocks = nn.ModuleList([blocks[0], blocks[2]])
    run.train(model, optimizer, steps=[2])
    model.module.blocks = blocks
    run.train(model, optimizer, steps=[3])


@scenario()
def test_a_weight_tied_after_wrapping_trains_as_tied(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    first, second = model.module.blocks
    second.up.weight = first.up.weight
    run.train(model, optimizer, steps=[2, 3])


@scenario()
def test_an_embedding_that_rescales_its_rows_is_refused(run: Run) -> None:
    """Its forward writes to the weight: the write would be lost, or differ from rank to rank."""
    embeddings = nn.Embedding(5, WIDTH, max_norm=1.0), nn.EmbeddingBag(5, WIDTH, max_norm=1.0)
    for embedding in () if run.is_plain else embeddings:
        with pytest.raises((ConfigError, ValueError), match="max_norm"):
            run.wrap(nn.Sequential(embedding))
    run.train_module(Blocks())


@scenario()
def test_modules_without_values_or_parameters_are_refused(run: Run) -> None:
    if not run.is_plain:
        with pytest.raises((ConfigError, ValueError), match=r"(?i)parameter"):
            run.wrap(nn.ReLU())
        with pytest.raises((ConfigError, ValueError), match=r"(?i)lazy|uninitialized|materializ"):
            run.wrap(nn.Sequential(nn.LazyLinear(4)))
        with pytest.raises((ConfigError, ValueError), match="meta"):
            run.wrap(nn.Linear(4, 4, device="meta"))
    run.train_module(Blocks())
