"""Forwards and backwards in every order that torch allows, and accumulation over them."""

import pytest
import torch
from torch import Tensor

from tests.scenarios import DEFAULT, HOST, STAGES, Block, Blocks, Model, Run, mean_square, scenario


@scenario(DEFAULT + HOST)
def test_a_step_between_a_forward_and_its_backward_raises_as_in_torch(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        first, second = (mean_square(model, run.batch(10 * step + n)) for n in range(2))
        run.record(first).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|optimizer.*step"):
            second.backward()
        optimizer.zero_grad()
        run.train(model, optimizer, steps=[step])


@scenario(DEFAULT + HOST)
def test_loading_between_a_forward_and_its_backward_raises_as_in_torch(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        with model.gathered() as module:  # which keeps the parameters unsharded until the step
            penalty = sum(param.square().sum() for param in module.parameters())
        loss = mean_square(model, run.batch(step)) + penalty
        model.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|another in-place operation"):
            loss.backward()
        optimizer.zero_grad()
        run.train(model, optimizer, steps=[step])


@scenario()
def test_forwards_have_their_backwards_in_either_order(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(4):
        optimizer.zero_grad()
        losses = [run.record(mean_square(model, run.batch(10 * step + n))) for n in range(3)]
        with model.accumulate():
            for loss in losses[:0:-1] if step % 2 else losses[:2]:
                loss.backward()
        losses[0 if step % 2 else 2].backward()
        optimizer.step()


@scenario(DEFAULT + HOST)
def test_forwards_without_gradients_are_between_a_forward_and_its_backward(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(3):
        optimizer.zero_grad()
        loss = run.record(mean_square(model, run.batch(step)))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                value = mean_square(model, run.batch(20 + step)).clone()
            run.record(value)
        loss.backward()
        optimizer.step()


@scenario(DEFAULT + HOST)
def test_gradients_accumulate_in_every_form(run: Run) -> None:
    model, optimizer = run.start(Blocks())

    def backward(step: int, number: int) -> None:
        run.record(mean_square(model, run.batch(10 * step + number)) / 3).backward()

    for step in range(3):
        optimizer.zero_grad()
        if step == 0:  # a context around all but the last
            with model.accumulate():
                backward(step, 0)
                backward(step, 1)
            backward(step, 2)
        elif step == 1:  # a context around each, or inside another one
            with model.accumulate():
                with model.accumulate():
                    backward(step, 0)
                backward(step, 1)
            with model.accumulate():
                backward(step, 2)
            backward(step, 3)
        else:  # a context around all of them
            with model.accumulate():
                for number in range(3):
                    backward(step, number)
        optimizer.step()


@scenario()
def test_losses_are_added_up_before_their_backward(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        losses = [run.record(mean_square(model, run.batch(10 * step + number))) for number in range(3)]
        (sum(losses) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.autograd.backward([mean_square(model, run.batch(30 + step)), mean_square(model, run.batch(40 + step))])
        optimizer.step()


@scenario()
def test_a_forward_whose_output_is_dropped_leaves_nothing(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(3):
        model(run.batch(30))
        kept = model(run.batch(31))
        run.train(model, optimizer, steps=[step])
        assert kept.requires_grad


class Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails:
            raise KeyError("on purpose")
        return x


@scenario(DEFAULT + HOST)
def test_a_step_after_a_forward_that_raised_is_as_usual(run: Run) -> None:
    model, optimizer = run.start(Blocks(Fails(), Fails()))
    for step in range(3):
        failing = model.module.blocks[step % 2]
        failing.fails = True
        with pytest.raises(KeyError, match="on purpose"):
            model(run.batch(30))
        failing.fails = False
        run.train(model, optimizer, steps=[step])


@scenario(STAGES)
def test_blocks_are_skipped_and_repeated_from_step_to_step(run: Run) -> None:
    class Order(Blocks):
        order = (0, 1)

        def encode(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for index in self.order:
                x = self.blocks[index](x)
            return x

    model, optimizer = run.start(Order(Block(), Block(), Block()))
    for step, order in enumerate([(0, 1, 2), (2, 0), (1, 1, 0), (), (0, 1, 2)]):
        model.module.order = order
        run.train(model, optimizer, steps=[step])


@scenario()
def test_a_block_is_shared_and_a_weight_is_in_two_units(run: Run) -> None:
    first, second, third = Block(), Block(), Block()
    second.up.weight = first.up.weight  # tied across two units
    third.down = first.down  # a shared submodule
    model = run.wrap(Blocks(first, second, third, first))  # and a block that occurs twice
    run.train(model, run.optimizer(model), steps=range(3))


@scenario(DEFAULT + HOST)
def test_a_frozen_teacher_is_divided_too(run: Run) -> None:
    teacher, student = run.wrap(Blocks(Block()).requires_grad_(False)), run.wrap(Blocks())

    def loss(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (model(x) - target).square().mean() + teacher(model.module.embed(x)).square().mean()

    run.train(student, run.optimizer(student), loss, steps=range(3))
