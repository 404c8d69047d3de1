"""Methods of the model and of submodules that run beside its forward, and hooks of the user."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import DEFAULT, HOST, STAGES, WIDTH, Block, Blocks, Loss, Model, Run, mean_square, scenario
from zero.buckets.guarded_parameter import GradientAccessError


class Methods(Blocks):
    """A model whose methods read parameters of the root and of blocks, and call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(WIDTH))

    def shifted(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.bias

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - 0.5).square().mean() + (self.shifted(x) @ self.head.weight.t()).square().mean()


@scenario()
def test_a_registered_method_calls_forward_and_other_methods(run: Run) -> None:
    model = run.wrap(Methods())
    model.register_forward_method("training_step")
    run.train(model, run.optimizer(model), lambda model, x: model.module.training_step(x), steps=range(3))


@scenario()
def test_a_registered_method_of_a_block_runs_as_forward_does(run: Run) -> None:
    model = run.wrap(Blocks())
    for block in model.module.blocks:
        model.register_forward_method("mlp", block)

    def loss(model: Model, x: Tensor) -> Tensor:
        first, second = model.module.blocks
        return second.mlp(first.mlp(x)).square().mean()

    run.train(model, run.optimizer(model), loss, steps=range(3))


@scenario(DEFAULT + HOST)
def test_a_submodule_is_called_directly(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        module = model.module
        hidden = module.embed(x)  # of the root
        hidden = module.blocks[1](hidden)  # a unit
        return module.head(module.blocks[0].up(hidden)[:, :WIDTH]).square().mean()  # a part of a unit

    run.train_module(Blocks(), loss, steps=range(3))


@scenario()
def test_the_module_is_called_without_its_wrapper(run: Run) -> None:
    run.train_module(Blocks(), lambda model, x: mean_square(model.module, x), steps=range(3))


class Generates(Blocks):
    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.cat([self(x), x[:, :2]], dim=1)
        return x


@scenario()
def test_samples_are_generated_between_steps(run: Run) -> None:
    model, optimizer = run.start(Generates())
    for step in range(3):
        run.train(model, optimizer, lambda model, x: mean_square(model, model.module.generate(x)), steps=[step])
        run.record(model.module.generate(run.batch(9)).mean())


When = Callable[[nn.Module], None]


def before_and_after(
    run: Run, register: When, make: Callable[[], nn.Module] = Blocks, loss: Loss = mean_square
) -> None:
    """Train a model whose hooks are registered before it is wrapped, then one whose hooks are registered after."""
    module = make()
    register(module)
    run.train_module(module, loss)
    model = run.wrap(make())
    register(model.module)
    run.train(model, run.optimizer(model), loss)


def own_weight(module: nn.Module) -> Tensor:
    return next(module.parameters(recurse=False), None) if isinstance(module, Block) else module.head.weight[0, :1]


def scale_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] * own_weight(module).norm().tanh(),)


def scale_output(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * own_weight(module).norm().tanh()


def scale_by_child(module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * module.down.weight.norm().tanh()


@scenario()
def test_hooks_of_blocks_and_of_the_root_change_inputs_and_outputs_and_read_parameters(run: Run) -> None:
    def register(module: nn.Module) -> None:
        for part in (module, *module.blocks):
            part.register_forward_pre_hook(scale_input)
            part.register_forward_hook(scale_output)
            part.register_forward_hook(scale_output, prepend=True)
            part.register_forward_pre_hook(scale_input, prepend=True)
        module.blocks[0].register_forward_hook(scale_by_child)

    before_and_after(run, register)


@scenario()
def test_hooks_of_the_wrapper_run(run: Run) -> None:
    model = run.wrap(Blocks())
    model.register_forward_pre_hook(lambda _model, inputs: (2 * inputs[0],))
    model.register_forward_hook(lambda _model, _inputs, output: output.sin())
    run.train(model, run.optimizer(model))


@scenario()
def test_a_hook_keeps_features_for_the_loss(run: Run) -> None:
    features: list[Tensor] = []

    def register(module: nn.Module) -> None:
        for block in module.blocks:
            block.up.register_forward_hook(lambda _module, _inputs, output: features.append(output))

    def loss(model: Model, x: Tensor) -> Tensor:
        features.clear()
        return mean_square(model, x) + sum(feature.square().mean() for feature in features)

    before_and_after(run, register, loss=loss)


@scenario()
def test_full_backward_hooks_change_gradients_and_read_parameters(run: Run) -> None:
    def scale(module: nn.Module, grads_in: tuple[Any, ...], _grads_out: Any) -> tuple[Any, ...]:
        return tuple(grad if grad is None else grad * own_weight(module).detach().norm() for grad in grads_in)

    def register(module: nn.Module) -> None:
        for part in (module, *module.blocks):
            part.register_full_backward_hook(scale)
            part.register_full_backward_pre_hook(lambda _module, grads_out: (1.2 * grads_out[0],))

    before_and_after(run, register)


@scenario()
def test_hooks_of_parameters_mask_their_gradients_by_their_values(run: Run) -> None:
    """A hook of a tensor runs in backward, where its parameter is gathered."""

    def register(module: nn.Module) -> None:
        for param in module.parameters():
            param.register_hook(lambda grad, param=param: 2 * grad * (param.detach() > 0))

    before_and_after(run, register)


@scenario()
def test_hooks_of_activations_change_gradients(run: Run) -> None:
    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda grad: 2 * grad)
            y = super().forward(x)
            y.register_hook(torch.relu)
            return y

    run.train_module(Blocks(Hooked(), Hooked()))


@scenario()
def test_gradients_of_activations_are_retained(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        kept = model.module.kept = []
        model.module.blocks[0].kept = kept
        return mean_square(model, x)

    class Keeps(Block):
        kept: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.retain_grad()
            self.kept.append(y)
            return y

    model, optimizer = run.start(Blocks(Keeps(), Block()))
    for step in range(2):
        run.train(model, optimizer, loss, steps=[step])
        (output,) = model.module.kept
        run.record((output.grad * len(output)).square().mean())


@scenario()
def test_hooks_after_accumulation_raise_if_they_read_the_gradient(run: Run) -> None:
    """An optimizer that steps inside backward does so, but the engine has taken the gradient."""
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    if not run.is_plain:
        handle = model.module.head.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        with pytest.raises(GradientAccessError):
            mean_square(model, run.batch(2)).backward()
        handle.remove()
        optimizer.zero_grad()
    run.train(model, optimizer, steps=[3])


@scenario(STAGES)
def test_hooks_get_keyword_arguments_and_always_run(run: Run) -> None:
    class Keyword(Blocks):
        def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            return super().forward(x) * factor

    def double(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"factor": 2.0}

    def register(module: nn.Module) -> None:
        module.register_forward_pre_hook(double, with_kwargs=True)
        module.register_forward_hook(lambda _m, _args, kwargs, y: y * kwargs["factor"], with_kwargs=True)
        module.register_forward_hook(lambda _m, _args, y: y.sin(), always_call=True)

    before_and_after(run, register, Keyword)


@scenario()
def test_a_step_after_a_backward_that_raised_is_as_usual(run: Run) -> None:
    def fail(_grad: Tensor) -> None:
        raise KeyError("on purpose")

    def break_off(block: nn.Module) -> Any:
        return block.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)

    model, optimizer = run.start(Blocks())
    for step in range(3):
        handle = break_off(model.module.blocks[step % 2])
        with pytest.raises(KeyError, match="on purpose"):
            mean_square(model, run.batch(30)).backward()
        handle.remove()
        if step % 2:
            model.zero_grad()
        run.train(model, optimizer, steps=[step])
