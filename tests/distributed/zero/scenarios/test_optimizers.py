"""Several optimizers, adversarial training, schedulers, and parameters in no group."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup

from tests.scenarios import (
    DEFAULT,
    FIRST_AND_LAST,
    HOST,
    STAGES,
    WIDTH,
    Block,
    Blocks,
    Configuration,
    Model,
    Optimizer,
    Run,
    mean_square,
    scenario,
)


def real_loss(logits: Tensor) -> Tensor:
    return nn.functional.softplus(-logits).mean()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList([Block(), Block()])
        self.discriminator = nn.ModuleList([Block(), nn.Linear(WIDTH, 1)])

    def forward(self, x: Tensor, discriminates: bool) -> Tensor:
        for block in self.discriminator if discriminates else self.generator:
            x = block(x)
        return x


@scenario()
def test_one_half_of_a_model_is_frozen_while_the_other_steps(run: Run) -> None:
    """Lightning's `toggle_optimizer`."""
    model = run.wrap(Gan())
    parts = model.module.generator, model.module.discriminator
    optimizers = [run.optimizer(model, groups=[{"params": list(part.parameters())}]) for part in parts]
    for step in range(4):
        this, other = parts[step % 2], parts[1 - step % 2]
        other.requires_grad_(False)
        optimizers[step % 2].zero_grad()
        run.record(real_loss(model(model(run.batch(step), False), True))).backward()
        optimizers[step % 2].step()
        other.requires_grad_(True)
        assert all(param.requires_grad for param in this.parameters())


SCHEDULERS = {
    "lambda": lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step)),
    "step": lambda inner: lr_scheduler.StepLR(inner, step_size=1, gamma=0.5),
    "cosine": lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=3),
    "one cycle": lambda inner: lr_scheduler.OneCycleLR(inner, max_lr=0.1, total_steps=4),
    "cyclic": lambda inner: lr_scheduler.CyclicLR(inner, 0.01, 0.1, step_size_up=2),
    "sequential": lambda inner: lr_scheduler.SequentialLR(
        inner, [lr_scheduler.LinearLR(inner, total_iters=2), lr_scheduler.ExponentialLR(inner, 0.9)], milestones=[2]
    ),
}


@scenario(FIRST_AND_LAST)
def test_torchs_schedulers_set_the_learning_rates(run: Run) -> None:
    for number, make in enumerate(SCHEDULERS.values()):
        model = run.wrap(Blocks())
        optimizer = run.optimizer(model)
        driven = optimizer.inner if number % 2 else optimizer
        scheduler = make(driven)
        for step in range(4):
            run.train(model, optimizer, steps=[step])
            scheduler.step()
        plateau = lr_scheduler.ReduceLROnPlateau(driven, patience=0)
        for _ in range(3):
            plateau.step(1.0)
        run.train(model, optimizer, steps=[4])


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD that trains with one point between an average and its own values, and evaluates with the average.

    As those of the package `schedulefree`, it begins in the mode of evaluation, in which it refuses to step.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.75):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def eval(self) -> None:
        self._move(False, lambda group: 1 - 1 / group["beta"])

    def train(self) -> None:
        self._move(True, lambda group: 1 - group["beta"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise Exception("not in the mode of training")
            group["k"] += 1
            for param in (param for param in group["params"] if param.grad is not None):
                state, share = self.state[param], 1 / group["k"]
                z = state.setdefault("z", param.detach().clone())
                param.lerp_(z, share).add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])

    @torch.no_grad()
    def _move(self, trains: bool, weight: Callable[[dict[str, Any]], float]) -> None:
        for group in (group for group in self.param_groups if group["train_mode"] is not trains):
            group["train_mode"] = trains
            for param in (param for param in group["params"] if self.state[param]):
                param.lerp_(self.state[param]["z"], weight(group))


@scenario([Configuration(1, offloads=True), Configuration(2)])  # where the owned pieces are not all of the parameters
def test_an_optimizer_evaluates_with_other_values_than_it_trains_with(run: Run) -> None:
    model, optimizer = run.start(Blocks(), ScheduleFreeSGD, lr=0.1)
    for epoch in range(2):
        optimizer.inner.train()
        run.train(model, optimizer, steps=[2 * epoch, 2 * epoch + 1])
        optimizer.inner.eval()
        with torch.no_grad():
            run.record(mean_square(model, run.batch(9)))


@scenario(STAGES + HOST)
def test_closures_and_changed_gradients_train(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 4)

    def clip_by_value() -> None:
        for _, grad in optimizer.gradients():
            grad.clamp_(-0.01, 0.02)

    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, run.batch(step))
            loss.backward()
            return loss

        run.record(optimizer.step(closure, gradient_hook=clip_by_value))
        scheduler.step()


@scenario(DEFAULT + HOST)
def test_step_hooks_run_once_a_step(run: Run) -> None:
    for is_inner in (False, True):
        model, optimizer = run.start(Blocks())
        count_step_hooks(run, model, optimizer, optimizer.inner if is_inner else optimizer)


def count_step_hooks(run: Run, model: Model, optimizer: Optimizer, driven: torch.optim.Optimizer) -> None:
    calls: list[str] = []

    def before(inner: torch.optim.Optimizer, *_: object) -> None:
        calls.append("before")
        for group in inner.param_groups:
            group["lr"] *= 0.5

    @torch.no_grad()
    def after(*_: object) -> None:
        calls.append("after")
        with model.gathered() as module:
            run.record(module.head.weight.sum())
            for param in module.parameters():
                param.clamp_(-0.4, 0.4)

    driven.register_step_pre_hook(before)
    driven.register_step_post_hook(after)
    run.train(model, optimizer, steps=range(3))
    assert calls == ["before", "after"] * 3


KINDS = [
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


@scenario(FIRST_AND_LAST)
def test_every_element_wise_optimizer_of_torch_trains(run: Run) -> None:
    for kind, settings in KINDS:
        model = run.wrap(Blocks(Block()))
        run.train(model, run.optimizer(model, kind, **settings), steps=range(3))
