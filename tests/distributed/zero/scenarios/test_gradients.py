"""Gradients: they belong to the engine, which discards them when it is told to and raises if something reads them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.scenarios import DEFAULT, HOST, Blocks, Model, Optimizer, Run, mean_square, scenario
from zero.buckets.guarded_parameter import GradientAccessError


def all_zero(model: Model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.grad.zero_()


# What reads or changes the gradients of a model after its backward.
READS: dict[str, Callable[[Model], object]] = {
    "grad": lambda model: model.module.head.weight.grad,
    "grads": lambda model: [param.grad for param in model.parameters()],
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_, one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model: nn.utils.get_total_norm([param.grad for param in model.parameters()]),
    "zero_": all_zero,
    "is None": lambda model: [param for param in model.parameters() if param.grad is None],
}


@scenario()
def test_a_read_of_a_gradient_raises_while_the_engine_holds_it(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        assert all(param.grad is None for param in model.parameters())
        with model.accumulate():
            run.record(mean_square(model, run.batch(step))).backward()
        for is_last in () if run.is_plain else (False, True):
            for name, read in READS.items():
                with pytest.raises(GradientAccessError, match="clip_norm" if "clip_grad_norm" in name else ""):
                    read(model)
            if not is_last:
                mean_square(model, run.batch(7 + step)).backward()
        if run.is_plain:
            mean_square(model, run.batch(7 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def set_to_none(model: Model) -> None:
    """Assign None: this discards the gradients or raises, and never keeps them."""
    for param in model.parameters():
        param.grad = None


DISCARDS: list[Callable[[Model, Optimizer], object]] = [
    lambda _, optimizer: optimizer.zero_grad(),
    lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, _: model.zero_grad(),
    lambda model, _: model.module.zero_grad(),  # reads gradients as any code does, and may raise
    lambda model, _: set_to_none(model),
]


@scenario(DEFAULT + HOST)
def test_an_abandoned_backward_leaves_nothing(run: Run) -> None:
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
            assert all(param.grad is None or not param.grad.any() for param in model.parameters())
            run.record(mean_square(model, run.batch(60 + step))).backward()
            optimizer.step()
            optimizer.zero_grad()


@scenario()
def test_a_gradient_that_the_user_assigns_is_refused(run: Run) -> None:
    """It would be ignored in silence: the engine holds the gradients that the optimizer uses."""
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    optimizer.zero_grad()
    if not run.is_plain:
        weight = model.module.head.weight
        with pytest.raises((RuntimeError, ValueError)):  # noqa: PT012
            weight.grad = torch.ones(weight.shape)
            mean_square(model, run.batch(2)).backward()
            optimizer.step()
        model.zero_grad()
    run.train(model, optimizer, steps=[3])


@scenario()
def test_only_chosen_parameters_take_gradients(run: Run) -> None:
    """`backward(inputs=...)` computes the gradients of these parameters only."""
    model, optimizer = run.start(Blocks())
    for step, chosen in enumerate((model.module.head, model.module.blocks[0], model.module)):
        optimizer.zero_grad()
        run.record(mean_square(model, run.batch(step))).backward(inputs=list(chosen.parameters()))
        optimizer.step()
