"""Gradients taken by torch.autograd.grad and torch.func, of inputs and parameters, and losses that contain them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.scenarios import DEFAULT, GROUPS, HOST, STAGES, WIDTH, Block, Blocks, Model, Run, mean_square, scenario


def input_gradient(model: Model, x: Tensor, create_graph: bool) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
    return gradient


@scenario(DEFAULT + HOST + GROUPS)
def test_a_gradient_penalty_trains(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        gradient = input_gradient(model, x, create_graph=True)
        return model(x).mean() + (gradient.norm(dim=1) - 1).square().mean()

    run.train_module(Blocks(), loss, steps=range(3))


class Energy(nn.Module):
    """A potential whose forces are computed inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = self.net(x).sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -gradient


@scenario(DEFAULT + HOST)
def test_a_loss_of_energies_and_forces_trains(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        energy, forces = model(x)
        return energy.square().mean() + (forces - 1).square().mean()

    model, optimizer = run.start(Energy())
    run.train(model, optimizer, loss, steps=range(3))
    model.eval()
    with torch.no_grad():
        run.record(model(run.batch(9))[1].square().mean())


@scenario()
def test_a_differential_equation_is_learned(run: Run) -> None:
    """A second derivative by the input in the loss: three backwards through the graph."""

    def loss(model: Model, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (second[:, 0] + y[:, 0]).square().mean() + y.square().mean()

    run.train_module(Blocks(), loss)


@scenario()
def test_input_gradients_without_a_graph_are_taken_between_steps(run: Run) -> None:
    """Adversarial examples; the gradients of the parameters are left alone."""

    def loss(model: Model, x: Tensor) -> Tensor:
        return mean_square(model, x + 0.1 * input_gradient(model, x, create_graph=False).sign())

    run.train_module(Blocks(), loss, steps=range(3))


@scenario()
def test_gradients_of_parameters_are_taken_by_autograd(run: Run) -> None:
    """They are those of a rank's own rows; the engine holds nothing of them."""
    model, optimizer = run.start(Blocks())
    for step in range(3):
        optimizer.zero_grad()
        parts = run.parts(step)
        names = [name for name, _ in model.module.named_parameters()]
        totals = [
            torch.autograd.grad(mean_square(model, part) / len(parts), list(model.parameters())) for part in parts
        ]
        for _, *grads in zip(names, *totals, strict=True):
            run.record(sum(grads))
        assert all(param.grad is None for param in model.parameters())
        run.record(mean_square(model, run.batch(step))).backward()
        optimizer.step()


def gradient_norm(model: Model, x: Tensor) -> Tensor:
    """Return the squared norm of the gradient of a rank's own rows."""
    loss = mean_square(model, x)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.01 * sum(grad.square().sum() for grad in grads)


@scenario(DEFAULT + HOST)
def test_a_loss_contains_the_norm_of_the_gradient_of_parameters(run: Run) -> None:
    run.train_by_parts(*run.start(Blocks()), gradient_norm, num_steps=3)


@scenario()
def test_a_loss_contains_the_gradient_of_some_parameters_inside_gathered(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        with model.gathered() as module:
            error = mean_square(model, x)
            chosen = [module.head.weight, module.blocks[1].up.weight]
            return error + sum(g.square().sum() for g in torch.autograd.grad(error, chosen, create_graph=True))

    run.train_by_parts(*run.start(Blocks()), loss)


@scenario(STAGES)
def test_jacobians_and_hessians_by_the_input_are_computed(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        x = run.batch(9)[:1]
        x = torch.ones_like(x)  # the same row on all ranks
        jacobian = torch.autograd.functional.jacobian(model, x, create_graph=True)
        hessian = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x)
        run.record(jacobian.sin().sum())
        run.record(hessian.sin().sum())
        optimizer.zero_grad()
        run.record(jacobian.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.train(model, optimizer, steps=[step])


TRANSFORMS: list[Callable[[Callable[[Tensor], Any], Tensor], Tensor]] = [
    lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
    lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vmap(torch.func.grad(lambda row: f(row).square().sum()))(x),
    lambda f, x: torch.func.jacfwd(f)(x),
]


@scenario(DEFAULT + HOST)
def test_transforms_of_torch_func_gather_what_they_run(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)  # the same rows on all ranks
    for step in range(2):
        for transform in TRANSFORMS:
            run.record(transform(model, x).sin().sum())
        run.train(model, optimizer, steps=[step])


@scenario(STAGES)
def test_a_custom_function_recomputes_its_block_in_backward(run: Run) -> None:
    """Reversible networks and deep equilibrium models do this."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, block: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.block(x)
                grads = torch.autograd.grad(y, [x, *ctx.block.parameters()], grad)
            return None, *grads

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return Recompute.apply(self.block, x, *self.block.parameters())

    run.train_module(Blocks(Recomputes(), Block()))
