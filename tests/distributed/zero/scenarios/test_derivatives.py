"""Gradients taken by torch.autograd.grad and torch.func, of inputs and parameters, and losses that contain them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.procedures import With, trains, trains_parts
from tests.scenarios import WIDTH, Blocks, Model, Run, as_test, cases, mean_square


def input_gradient(model: Model, x: Tensor, create_graph: bool) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
    return gradient


def gradient_penalty(model: Model, x: Tensor) -> Tensor:
    return model(x).mean() + (input_gradient(model, x, create_graph=True).norm(dim=1) - 1).square().mean()


def adversarial_loss(model: Model, x: Tensor) -> Tensor:
    return mean_square(model, x + 0.1 * input_gradient(model, x, create_graph=False).sign())


def energy_and_forces(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a potential and its forces, which are computed inside the forward."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = m.net(x).sum(1)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=m.training)
    return energy, -gradient


def energies_and_forces(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        energy, forces = model(x)
        return energy.square().mean() + (forces - 1).square().mean()

    model, optimizer = run.start(With(energy_and_forces, net=Blocks()))
    run.train(model, optimizer, loss, steps=range(3))
    model.eval()
    with torch.no_grad():
        run.record(model(run.batch(9))[1].square().mean())


def gradients_of_parameters(run: Run) -> None:
    """They are those of a rank's own rows; the engine holds nothing of them."""
    model, optimizer = run.start(Blocks())
    for step in range(3):
        optimizer.zero_grad()
        params, parts = list(model.parameters()), run.parts(step)
        totals = [torch.autograd.grad(mean_square(model, part) / len(parts), params) for part in parts]
        for grads in zip(*totals, strict=True):
            run.record(sum(grads))
        assert all(param.grad is None for param in params)
        run.record(mean_square(model, run.batch(step))).backward()
        optimizer.step()


def gradient_norm(model: Model, x: Tensor, _rank: int) -> Tensor:
    """Return a loss with the squared norm of the gradient of a rank's own rows."""
    loss = mean_square(model, x)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.01 * sum(grad.square().sum() for grad in grads)


TRANSFORMS: list[Callable[[Callable[[Tensor], Any], Tensor], Tensor]] = [
    lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
    lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vmap(torch.func.grad(lambda row: f(row).square().sum()))(x),
    lambda f, x: torch.func.jacfwd(f)(x),
]


def transforms(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)  # the same rows on all ranks
    for step in range(2):
        for transform in TRANSFORMS:
            run.record(transform(model, x).sin().sum())
        run.train(model, optimizer, steps=[step])


class FusedHead(torch.autograd.Function):
    """A head and its loss in one function, which computes the output again in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return (h @ weight.t() - 0.5).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        y = h @ weight.t() - 0.5
        return grad * 2 / y.numel() * y @ weight, grad * 2 / y.numel() * y.t() @ h


def with_fused_head() -> nn.Module:
    return With(lambda m, x: FusedHead.apply(m.body.encode(x), m.body.head.weight), body=Blocks())


FUSED_UNITS = ("body.embed", "body.blocks.*", "body.head")
TABLE = {
    "autograd-grad": cases(
        {
            "a gradient penalty": trains(Blocks, loss=gradient_penalty),
            "adversarial examples": trains(Blocks, loss=adversarial_loss),
            "the norm of the gradient in the loss": trains_parts(Blocks, gradient_norm),
            "VeOmni#804, accelerate#4015: a fused head is a unit": trains_parts(
                with_fused_head, lambda model, x, _rank: model(x), units=FUSED_UNITS
            ),
        },
        energies_and_forces,
        gradients_of_parameters,
    ),
    "torch-func": cases(transforms),
}

test_scenario = as_test(__name__, TABLE)
