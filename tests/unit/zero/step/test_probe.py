"""Stepping one bucket at a time equals stepping all at once; optimizers for which it does not are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.validation.errors import ConfigError
from zero.core.step.element_wise import ElementWise
from zero.core.step.parameter_groups import as_groups
from zero.core.step.pieces import Piece
from zero.core.step.probe import probe
from zero.updates.adamw8bit import BLOCK, AdamW8bit
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.muon import Muon

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("optimizer", "group", "bytes_an_element"),
    [
        (torch.optim.AdamW, {"fused": True}, 8),
        (torch.optim.AdamW, {"amsgrad": True}, 12),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 4),
        (torch.optim.RMSprop, {}, 4),
        (torch.optim.Adagrad, {}, 4),
        (torch.optim.NAdam, {}, 8),
        (torch.optim.Adamax, {}, 8),
        (AdamW8bit, {}, 2 + 4 * 8 / (3 * BLOCK + 6)),  # the fourth block of the probed parameter is incomplete
        (AdamWBf16, {}, 4),
        (Muon, {}, 4),
    ],
)
def test_the_bytes_of_states(optimizer, group, bytes_an_element):
    assert probe(optimizer, {}, CPU, [{}, group])[1] == bytes_an_element


class MuonLike(torch.optim.Optimizer):
    """SGD that normalizes the gradients of some groups, after a warm-up, or fails if they are no matrices."""

    def __init__(
        self, params: Any, lr: float = 1e-2, normalizes: bool = False, decomposes: bool = False, warmup: int = 0
    ):
        defaults = {"lr": lr, "normalizes": normalizes, "decomposes": decomposes, "warmup": warmup}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                step = self.state[param]["step"] = self.state[param].get("step", 0) + 1
                normalizes = group["normalizes"] and step > group["warmup"]
                grad = param.grad / param.grad.norm() if normalizes else param.grad
                grad = torch.linalg.qr(grad).Q if group["decomposes"] else grad
                param.sub_(grad, alpha=group["lr"])


class Adapting(torch.optim.Optimizer):
    """SGD that multiplies its rate by a number of all gradients that it has seen, as D-Adaptation and Prodigy do."""

    def __init__(self, params: Any, lr: float = 1.0, start: float = 1e-6):
        super().__init__(params, {"lr": lr, "distance": start})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            group["distance"] *= 1 + sum(float(param.grad.abs().sum()) for param in params) / 1e3
            for param in params:
                param.sub_(param.grad, alpha=group["lr"] * group["distance"])


class MeanDecay(torch.optim.Optimizer):
    """SGD that decays weights by their mean."""

    def __init__(self, params: Any, lr: float = 1.0, decay: float = 1e-2):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            mean = torch.stack([param.abs().mean() for param in group["params"]] or [torch.zeros(())]).mean()
            for param in group["params"]:
                param.sub_(param.grad + group["decay"] * mean, alpha=group["lr"])


class WrongMuon(Muon):
    """A Muon that says that its matrices are elements."""

    update_class = ElementWise


@pytest.mark.parametrize(
    ("optimizer", "group", "reason"),
    [
        (WrongMuon, {}, "cannot step flat pieces"),
        (MuonLike, {"normalizes": True}, "is not element-wise"),
        (MuonLike, {"normalizes": True, "lr": 0.0}, "is not element-wise"),
        (MuonLike, {"normalizes": True, "warmup": 30}, "is not element-wise"),
        (MuonLike, {"decomposes": True}, "cannot step flat pieces"),
        (Adapting, {"lr": 1.0}, r"is not element-wise: .* in 2 pieces \(its distance\)"),
        (Adapting, {}, r"is not element-wise: .* in 2 pieces \(its distance\)"),
        (MeanDecay, {"lr": 1e-3}, "is not element-wise"),
        (torch.optim.Adafactor, {}, "is not element-wise"),
        (torch.optim.Muon, {}, "cannot step flat pieces"),
        (torch.optim.LBFGS, {}, "cannot step flat pieces"),
        (torch.optim.SparseAdam, {}, "cannot step flat pieces"),
        (torch.optim.AdamW, {"capturable": True}, r"does not work on cpu: .*capturable=True.*; change its"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_by_the_settings_of_each_group(optimizer, group, reason):
    if optimizer is MuonLike:
        probe(MuonLike, {"lr": 0.1}, CPU, [{"lr": 0.1}, {"lr": 0.0}])
    with pytest.raises(ConfigError, match=f"optimizer {optimizer.__name__} {reason}"):
        probe(optimizer, {"lr": 0.1}, CPU, [{"lr": 0.1}, group])


def test_a_function_that_makes_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match="what it makes is of class Linear, not of class Optimizer"):
        probe(lambda _params, **_settings: nn.Linear(2, 2), {}, CPU)


class Recorder(torch.optim.Optimizer):
    """An optimizer that records what it steps with, and counts steps in a setting of each group with parameters."""

    def __init__(self, params: Any):
        self.seen: list[tuple[list[float], list[Tensor], Any]] = []
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["counter"] = group.get("counter", 0) + 1
                grads = [param.grad.clone() for param in group["params"]]
                self.seen.append(([p.item() for p in group["params"]], grads, (group["lr"], group["counter"])))


def test_a_bucket_steps_its_own_pieces_with_their_groups_settings():
    params = [nn.Parameter(torch.tensor([float(index)])) for index in range(3)]
    groups = [{"params": [params[0], params[2]], "lr": 0.5}, {"params": [params[1]]}]
    update = ElementWise(Recorder(groups), range(2))
    buckets = [
        [Piece(params[0], range(1, 2), 0, "a", range(1)), Piece(params[1], range(3, 4), 1, "b", range(1))],
        [Piece(params[2], range(1), 0, "c", range(1))],
    ]
    for lr in (0.5, 0.25):
        update.optimizer.param_groups[0]["lr"] = lr
        with update.stepping():
            update.begin()
            for bucket in buckets:
                update.step([(bucket, torch.arange(10.0, 15.0))])
            update.end()
    first = torch.tensor([11.0]), torch.tensor([13.0]), torch.tensor([10.0])
    assert update.optimizer.seen == [
        ([value], [grad], (lr, counter))
        for counter, rate in ((1, 0.5), (2, 0.25))
        for value, grad, lr in ((0.0, first[0], rate), (1.0, first[1], 1.0), (2.0, first[2], rate))
    ]
    assert [group["params"] for group in update.optimizer.param_groups] == [[params[0], params[2]], [params[1]]]
    assert [group["counter"] for group in update.optimizer.param_groups] == [2, 2]
    assert all(param.grad is None for param in params)


def test_parameters_are_given_in_any_form_of_torchs():
    layer = nn.Linear(2, 3)
    weight, bias = layer.weight, layer.bias
    assert as_groups(layer.parameters()) == as_groups(layer.named_parameters()) == [{"params": [weight, bias]}]
    assert as_groups([{"params": weight, "lr": 0.1}, {"params": iter([bias])}]) == [
        {"params": [weight], "lr": 0.1},
        {"params": [bias]},
    ]
