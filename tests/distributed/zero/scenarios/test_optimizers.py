"""Optimizers of torch and others, their groups, schedulers, hooks, closures, and changed gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.procedures import With
from tests.scenarios import Block, Blocks, Configuration, Run, as_test, cases, mean_square


def schedulers(run: Run) -> None:
    for is_inner in (False, True):
        model, optimizer = run.start(Blocks())
        driven = optimizer.inner if is_inner else optimizer
        chosen = [
            lr_scheduler.OneCycleLR(driven, max_lr=0.1, total_steps=4),
            lr_scheduler.LambdaLR(driven, lambda step: 1 / (1 + step)),
        ]
        for step in range(4):
            run.train(model, optimizer, steps=[step])
            chosen[step // 2].step()


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


def other_values_for_evaluation(run: Run) -> None:
    model, optimizer = run.start(Blocks(), ScheduleFreeSGD, lr=0.1)
    for epoch in range(2):
        optimizer.inner.train()
        run.train(model, optimizer, steps=[2 * epoch, 2 * epoch + 1])
        optimizer.inner.eval()
        with torch.no_grad():
            run.record(mean_square(model, run.batch(9)))


def closures_and_changed_gradients(run: Run) -> None:
    model, optimizer = run.start(Blocks())

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


def with_root_of_zero() -> nn.Module:
    """Return a model with a parameter whose gradient is not finite."""
    return With(lambda m, x: m.body(x) + m.scale.relu().sqrt(), body=Blocks(), scale=nn.Parameter(torch.zeros(2)))


def gradients_are_replaced_and_scaled(run: Run) -> None:
    """Replace gradients that are not finite, and divide all by the largest value, of which a rank may own none."""
    model, optimizer = run.start(with_root_of_zero())

    def change() -> None:
        grads = [grad.nan_to_num_(0.0) for _, grad in optimizer.gradients()]
        largest = max([grad.abs().max() for grad in grads], default=torch.tensor(0.0))
        if not run.is_plain:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        run.record(largest)
        for grad in grads:
            grad.div_(largest)

    for step in range(3):
        mean_square(model, run.batch(step)).backward()
        run.record(optimizer.step(gradient_hook=change))
        optimizer.zero_grad()


def step_hooks(is_inner: bool, run: Run) -> None:
    """They run once a step."""
    model, optimizer = run.start(Blocks())
    driven = optimizer.inner if is_inner else optimizer
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
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def optimizers_of_torch(run: Run) -> None:
    for kind, settings in KINDS:
        run.train(*run.start(Blocks(Block()), kind, **settings), steps=range(3))


def settings_change_between_steps(run: Run) -> None:
    """Train groups, of which one is frozen and one empty; the embedding is in none, and the rates are tensors."""
    model = run.wrap(Blocks(Block().requires_grad_(False), Block()))
    parts = (*model.module.blocks, model.module.head)
    groups = [{"params": list(part.parameters())} for part in parts] + [{"params": []}]
    optimizer = run.optimizer(model, torch.optim.AdamW, groups, lr=torch.tensor(0.01), foreach=False)
    for step in range(4):
        run.train(model, optimizer, steps=[step])
        for number, group in enumerate(optimizer.inner.param_groups):
            group["lr"].mul_(0.7)
            group |= {"weight_decay": 0.2 * (step + number), "betas": (0.9 - 0.1 * number, 0.99 - 0.01 * step)}


TABLE = {
    "optimizers": cases(
        optimizers_of_torch,
        schedulers,
        {"pytorch#106916, DeepSpeed#7869, DeepSpeed#6873: groups": settings_change_between_steps},
    ),
    # Where the owned pieces are not all of the parameters.
    "evaluating-optimizers": cases(
        other_values_for_evaluation, few=[Configuration(1, offloads=True), Configuration(2)]
    ),
    "steps": cases(
        closures_and_changed_gradients,
        {"step hooks": partial(step_hooks, False), "step hooks of inner": partial(step_hooks, True)},
        {"LoongForge#152, SimpleTuner#2900: gradients are changed": gradients_are_replaced_and_scaled},
    ),
}

test_scenario = as_test(__name__, TABLE)
