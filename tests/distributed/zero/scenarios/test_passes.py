"""Forwards and backwards in every order that torch allows, accumulation over them, and steps after some that raised."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.procedures import With, choosing, linear, trains, trains_by
from tests.scenarios import Block, Blocks, Model, Optimizer, Run, as_test, cases, mean_square
from zero.any_module.guarded_parameter import GradientAccessError


def backwards_in_order(order: tuple[int, ...], model: Model, x: Tensor) -> None:
    losses = [mean_square(model, f(x)) for f in (torch.sin, torch.cos, torch.tanh)]
    with model.accumulate():
        for number in order[:-1]:
            losses[number].backward()
    losses[order[-1]].backward()


def forwards_without_gradients_in_between(model: Model, x: Tensor) -> None:
    y, targets = model(x), []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            target = model(x.cos())
        targets.append(target.clone())
    (y - targets[0] + 2 * targets[1]).square().mean().backward()


def accumulation_inside_another(model: Model, x: Tensor) -> None:
    with model.accumulate():
        with model.accumulate():
            mean_square(model, x.sin()).backward()
        mean_square(model, x.cos()).backward()
    with model.accumulate():
        mean_square(model, x).backward()
    mean_square(model, x.tanh()).backward()


def accumulation_of_all(model: Model, x: Tensor) -> None:
    with model.accumulate():
        for f in (torch.sin, torch.cos, torch.tanh):
            mean_square(model, f(x)).backward()


def two_losses_at_once(model: Model, x: Tensor) -> None:
    torch.autograd.backward([mean_square(model, x), mean_square(model, x.cos())])


def two_losses_of_one_graph(model: Model, x: Tensor) -> None:
    y = model(x)
    with model.accumulate():
        (y - 0.5).square().mean().backward(retain_graph=True)
    y.sin().mean().backward()


def backward_of_a_gradient(model: Model, x: Tensor) -> None:
    y = model(x)
    y.backward(y.detach().sin() / len(x))


def dropped_outputs(model: Model, x: Tensor) -> None:
    model(x.cos())
    kept = model(x.sin())
    mean_square(model, x).backward()
    assert kept.requires_grad


def backward_of_chosen_parameters(model: Model, x: Tensor) -> None:
    mean_square(model, x).backward(inputs=list(model.module.blocks[0].parameters()))


ORDERS = [(0, 1, 2), (2, 0), (1, 1, 0), (), (0, 1, 2)]


def in_another_order_in_each_step(m: Any, x: Tensor) -> Tensor:
    """Skip and repeat blocks."""
    h = m.body.embed(x)
    for index in ORDERS[m.num_calls]:
        h = m.body.blocks[index](h)
    m.num_calls += 1
    return m.body.head(h)


def first_used_in_the_last_micro_batch(model: Model, x: Tensor) -> None:
    """All parameters of the blocks but one are used only there."""
    for is_last in (False, True):
        for block in model.module.blocks:
            block.choice = not is_last
        with nullcontext() if is_last else model.accumulate():
            mean_square(model, x).backward()


def in_chunks(model: Model, hidden: list[Tensor], head: Callable[[Tensor], Tensor]) -> None:
    """Run the head and its backward on one row at a time, then the backward of what comes before the head."""
    cut = [h.detach().requires_grad_() for h in hidden]
    with model.accumulate():
        for row in range(len(cut[0])):
            for h in cut:
                ((head(h[row : row + 1]) - 0.5).square().mean() / len(h)).backward()
    torch.autograd.backward(hidden, [h.grad for h in cut])


def predict_twice(model: Model, x: Tensor) -> None:
    hidden = model.module.encode(x)
    in_chunks(model, [hidden, model.module.blocks[1](hidden + x)], model.module.head)


def keeping_activation() -> nn.Module:
    """Return a model whose loss uses an activation, and not the output."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.kept = m.embed(m.embed(x)).tanh()  # its backward reads the weight
        return m.body(m.kept)

    return With(forward, embed=linear(), body=Blocks())


def loss_of_activation(model: Model, x: Tensor) -> Tensor:
    model(x)
    return model.module.kept.square().mean()


def two_models_and_one_loss(run: Run) -> None:
    """The second one changes the output of the first, which the loss reads too; a third is frozen."""
    first, second = run.wrap(Blocks()), run.wrap(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)))
    teacher = run.wrap(Blocks(Block()).requires_grad_(False))
    optimizers = run.optimizer(first), run.optimizer(second)
    for step in range(3):
        x = run.batch(step)
        with torch.no_grad():
            target = teacher(x)
        h = first(x)
        run.record((second(h) + h * h - target + teacher(first.module.embed(x))).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def a_step_between_a_forward_and_its_backward(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        losses = [mean_square(model, run.batch(10 * step + n)) for n in range(2)]
        run.record(losses.pop(1 - step)).backward()  # in the first step that of the second forward
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|optimizer.*step"):
            losses[0].backward()
        run.train(model, optimizer, steps=[step])


def a_load_between_a_forward_and_its_backward(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        with model.gathered() as module:  # which keeps the parameters unsharded until the step
            penalty = sum(param.square().sum() for param in module.parameters())
        loss = mean_square(model, run.batch(step)) + penalty
        model.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|another in-place operation"):
            loss.backward()
        run.train(model, optimizer, steps=[step])


def raise_on_purpose(*_: object) -> None:
    raise KeyError("on purpose")


def fail_in_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    output.register_hook(raise_on_purpose)


def a_forward_or_a_backward_that_raises(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step, hook in enumerate((raise_on_purpose, fail_in_backward, raise_on_purpose, fail_in_backward)):
        handle = model.module.blocks[step // 2].register_forward_hook(hook)
        with pytest.raises(KeyError, match="on purpose"):
            mean_square(model, run.batch(30)).backward()
        handle.remove()
        if step == 1:
            model.zero_grad()
        run.train(model, optimizer, steps=[step])


def set_to_none(model: Model) -> None:
    """Assign None: this discards the gradients or raises, and never keeps them."""
    for weight in model.parameters():
        weight.grad = None


DISCARDS: list[Callable[[Model, Optimizer], object]] = [
    lambda _, optimizer: optimizer.zero_grad(),
    lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, _: model.zero_grad(),
    lambda model, _: model.module.zero_grad(),  # reads gradients as any code does, and may raise
    lambda model, _: set_to_none(model),
]


def abandoned_backwards(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step, discard in enumerate(DISCARDS):
        run.train(model, optimizer, steps=[step])
        for is_complete in (False, True):
            with model.accumulate():
                mean_square(model, run.batch(50)).backward()
            if is_complete:
                mean_square(model, run.batch(51)).backward()
            try:
                discard(model, optimizer)
            except GradientAccessError:
                assert step > 2
                model.zero_grad()
            assert all(weight.grad is None or not weight.grad.any() for weight in model.parameters())
            run.record(mean_square(model, run.batch(60 + step))).backward()
            optimizer.step()
            optimizer.zero_grad()


BACKWARDS = [
    forwards_without_gradients_in_between,
    accumulation_inside_another,
    accumulation_of_all,
    two_losses_at_once,
    backward_of_a_gradient,
    dropped_outputs,
    backward_of_chosen_parameters,
]
TABLE = {
    "passes": cases(
        {backward.__name__: trains_by(Blocks, backward) for backward in BACKWARDS},
        {
            "backwards in order": trains_by(Blocks, partial(backwards_in_order, (0, 1, 2))),
            "backwards in reverse": trains_by(Blocks, partial(backwards_in_order, (2, 1, 0))),
            "skipped and repeated blocks": trains(
                lambda: With(in_another_order_in_each_step, body=Blocks(Block(), Block(), Block()), num_calls=0),
                num_steps=5,
            ),
            "DeepSpeed#8135, DeepSpeed#3539: two losses of one graph": trains_by(Blocks, two_losses_of_one_graph),
            "pytorch#196996, pytorch#160279: first used in the last micro-batch": trains_by(
                lambda: Blocks(choosing(), choosing()), first_used_in_the_last_micro_batch
            ),
            "torchtitan#2937, torchtitan#4451, torchtitan#933: two outputs in chunks": trains_by(Blocks, predict_twice),
            "pytorch#174829: the loss of an activation": trains(keeping_activation, loss=loss_of_activation),
            "DeepSpeed#7018: two models and one loss": two_models_and_one_loss,
        },
    ),
    "errors": cases(a_forward_or_a_backward_that_raises, abandoned_backwards),
    "step-before-backward": cases(a_step_between_a_forward_and_its_backward, a_load_between_a_forward_and_its_backward),
}

test_scenario = as_test(__name__, TABLE)
