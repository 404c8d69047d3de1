"""Optimizers that are given made: one step, their states, their groups, and what is refused."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adagrad, AdamW, Optimizer, lr_scheduler

from parallel.mesh import Axis, Mesh
from parallel.tensor.gradient_sums import GradientSums
from parallel.validation.errors import ConfigError
from parallel.world import imitated_world
from tests.twins import params_of
from zero.checkpoint import rank_state
from zero.checkpoint.checkpoint import load, save
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig
from zero.updates.adamw8bit import AdamW8bit
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.muon import Muon
from zero.updates.soap import Soap


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))


def wrap(module: nn.Module | None = None, stage: int = 2) -> ZeroDataParallel:
    return ZeroDataParallel(module or layers(), Axis.trivial("data"), ZeroConfig(stage, 16, alignment=256))


def weights_and_biases(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(module.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() == 1]


def loss_of(module: nn.Module, step: int) -> Tensor:
    return module(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> dict[str, Tensor]:
    for step in steps:
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(model, ZeroDataParallel):
        return params_of(model)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def plain_pair(module: nn.Module) -> list[Optimizer]:
    weights, biases = weights_and_biases(module)
    return [SGD(weights, lr=0.1, momentum=0.9), AdamW(biases, lr=0.01, fused=True)]


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "adagrad": partial(Adagrad, lr=0.1, initial_accumulator_value=0.5),  # has states from its construction
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("num_plain_steps", [0, 2])
def test_an_optimizer_that_has_stepped_goes_on_from_its_states(name, num_plain_steps, stage):
    plain, own = layers(), layers()
    expected, made = MADE[name](plain.parameters()), MADE[name](own.parameters())
    for module, optimizer in ((plain, expected), (own, made)):
        train(module, [optimizer], range(num_plain_steps))
    model = wrap(own, stage)
    optimizer = ZeroOptimizer.like(model, made, clip_norm=1e9)
    assert optimizer.inner is made
    steps = range(num_plain_steps, num_plain_steps + 2)
    torch.testing.assert_close(train(model, [optimizer], steps), train(plain, [expected], steps))


@pytest.mark.parametrize("kind", [AdamW8bit, Soap])
def test_states_that_are_not_one_value_for_each_element_are_refused(kind):
    module = layers()
    weights, biases = weights_and_biases(module)
    made = kind(weights)
    train(module, [made], range(1))
    module.zero_grad()
    with pytest.raises(ConfigError, match=rf"{kind.__name__} .*; give .* ZeroOptimizer before its first step"):
        ZeroOptimizer(wrap(module), [first := SGD(biases, momentum=0.9), made])
    assert [param for one in (first, made) for param in one.param_groups[0]["params"]] == [
        *biases,
        *weights,
    ]  # as before


def test_the_groups_are_the_same_objects_and_a_schedule_of_a_member_moves_its_rate():
    model = wrap()
    pair = plain_pair(model.module)
    schedules = [lr_scheduler.StepLR(one, 1, gamma=0.5) for one in pair]
    optimizer = ZeroOptimizer(model, pair, clip_norm=1.0)
    schedules.append(lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a schedule steps before its optimizer
        loss_of(model, 0).backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0025]
    assert [group for one in pair for group in one.param_groups] == optimizer.param_groups
    assert {param for group in optimizer.param_groups for param in group["params"]} == set(model.module.parameters())


def reload(optimizer: ZeroOptimizer, model: ZeroDataParallel, folder: Path, way: str) -> None:
    if way == "zero":
        load(save(folder, model, optimizer), model, optimizer)
    elif way == "state dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("way", ["zero", "state dict", "torch"])
def test_a_load_leaves_the_groups_of_all_the_same_objects(way, tmp_path):
    model = wrap()
    pair = plain_pair(model.module)
    optimizer = ZeroOptimizer(model, pair)
    train(model, [optimizer], range(1))
    reload(optimizer, model, tmp_path, way)
    optimizer.param_groups[1]["lr"] = 9.0
    assert all(a is b for a, b in zip((g for o in pair for g in o.param_groups), optimizer.param_groups, strict=True))
    assert pair[1].param_groups[0]["lr"] == 9.0
    for call in (lambda: pair[0].load_state_dict({}), pair[1].state_dict):
        with pytest.raises(RuntimeError, match=r"divided over ranks; call `(load_)?state_dict` of the ZeroOptimizer"):
            call()


@pytest.mark.parametrize("kind", [Muon, AdamWBf16, SGD])
def test_a_list_goes_on_from_a_checkpoint(kind, tmp_path):
    def start() -> tuple[ZeroDataParallel, ZeroOptimizer]:
        model = wrap()
        weights, biases = weights_and_biases(model.module)
        return model, ZeroOptimizer(model, [AdamW(biases, lr=0.01, amsgrad=True), kind(weights, lr=0.1)])

    model, optimizer = start()
    train(model, [optimizer], range(2))
    save(tmp_path, model, optimizer)
    train(model, [optimizer], range(2, 4))
    resumed = start()
    load(tmp_path, *resumed)
    train(resumed[0], [resumed[1]], range(2, 4))
    for name, param in params_of(model).items():
        assert param.equal(params_of(resumed[0])[name]), name
    with pytest.raises(ConfigError, match=rf"saved with the optimizer AdamW\+{kind.__name__}, this run has AdamW;"):
        load(tmp_path, model := wrap(), ZeroOptimizer(model, AdamW))


def test_one_optimizer_keeps_its_own_defaults_and_a_list_has_those_that_all_have():
    model = wrap()
    made = AdamW(model.module.parameters(), lr=0.01)
    optimizer = ZeroOptimizer(model, [made])
    assert optimizer.defaults is made.defaults
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)  # reads betas there
    del optimizer
    model = wrap()
    optimizer = ZeroOptimizer(model, plain_pair(model.module))
    assert {"lr", "weight_decay"} <= optimizer.defaults.keys()
    assert optimizer.defaults.keys().isdisjoint({"betas", "momentum"})
    assert "betas" not in optimizer.param_groups[0]


@pytest.mark.parametrize("fused", [True, False])
def test_one_bad_gradient_skips_the_step_of_all_and_changes_one_loss_scale_once(fused):
    model, scale, calls = wrap(), LossScale(8.0, is_dynamic=True, hysteresis=1), list[str]()
    weights, biases = weights_and_biases(model.module)
    pair = [SGD(weights, lr=0.1, fused=fused), AdamW(biases, lr=0.01, fused=True)]
    for one in pair:
        one.register_step_post_hook(lambda one, *_: calls.append(type(one).__name__))
    optimizer = ZeroOptimizer(model, pair, loss_scale=scale)
    biases[0].register_hook(lambda grad: grad * math.inf)
    before = params_of(model)
    (loss_of(model, 0) * scale.scale).backward()
    assert not optimizer.step().isfinite()
    assert (optimizer.num_skipped.item(), scale.scale.item()) == (1, 4.0)
    assert all(before[name].equal(param) for name, param in params_of(model).items())
    assert calls == ["AdamW", "SGD"]


def test_a_model_has_one_optimizer_until_it_is_deleted():
    model = wrap()
    first = ZeroOptimizer(model, SGD, weights_and_biases(model.module)[0], lr=0.1)
    with pytest.raises(ConfigError, match=r"has a ZeroOptimizer already; give all optimizers to one, as in Zero"):
        ZeroOptimizer(model, SGD, weights_and_biases(model.module)[1])
    del first
    assert train(model, [ZeroOptimizer(model, SGD, lr=0.1)], range(1))


def test_sums_over_tensor_ranks_are_hooks_again_after_an_optimizer_with_that_axis():
    with imitated_world(0, 2, 2, "gloo"):
        model, tensor = wrap(), Mesh.create(tensor_size=2, imitated_backend="gloo").tensor
        model.module.sums = sums = GradientSums([model.module[0].bias], tensor)
        first = ZeroOptimizer(model, SGD, tensor=tensor)
        assert sums.is_deferred
        del first
        optimizer = ZeroOptimizer(model, SGD)
        assert not sums.is_deferred
        del optimizer


REFUSED: dict[str, tuple[Callable[[ZeroDataParallel], object], type[Exception], str]] = {
    "an empty list": (lambda model: [], ValueError, "empty list of optimizers"),
    "a class in the list": (lambda model: [AdamW], TypeError, "list of optimizers of ZeroOptimizer has <class"),
    "a parameter in two": (
        lambda model: [SGD(model.module.parameters()), SGD(model.module[0].parameters())],
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "another model's": (lambda model: [SGD(layers().parameters())], ValueError, "not of this model"),
    "one that is not element-wise": (
        lambda model: [torch.optim.Adafactor(model.module.parameters())],
        ConfigError,
        "Adafactor is not element-wise",
    ),
    "the old word": (
        lambda model: [Muon([{"params": model.module.parameters(), "update": "adamw"}])],
        ValueError,
        r"give two optimizers: ZeroOptimizer\(model, \[Muon",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_cannot_work_are_refused_in_one_line(name):
    make, error, message = REFUSED[name]
    model = wrap()
    with pytest.raises(error, match=message) as caught:
        ZeroOptimizer(model, make(model))
    assert "\n" not in str(caught.value)


def test_settings_beside_a_list_and_a_member_of_another_are_refused():
    model = wrap()
    made = SGD(model.module.parameters(), lr=0.1)
    for beside, words in (({"lr": 1.0}, "lr"), ({"groups": list(model.module.parameters())}, "groups")):
        with pytest.raises(ConfigError, match=f"got optimizers and {words}; give these to the optimizers in the list"):
            ZeroOptimizer(model, [made], **beside)
    ZeroOptimizer(model, [made])
    with pytest.raises(ConfigError, match="this SGD is in a ZeroOptimizer already; make another one"):
        ZeroOptimizer(wrap(), made)


def test_a_refused_list_leaves_all_optimizers_as_they_were():
    module = layers()
    weights, biases = weights_and_biases(module)
    pair = [AdamW(weights, lr=0.01), Muon(biases)]
    train(module, pair[:1], range(2))
    module.zero_grad()
    states = {param: dict(state) for param, state in pair[0].state.items()}
    model = wrap(module)
    for optimizers, settings in ((pair, {}), ([pair[0], Muon(weights[:0] or weights)], {"skip_unused": True})):
        with pytest.raises((ConfigError, ValueError)):
            ZeroOptimizer(model, optimizers, **settings)
        assert pair[0].param_groups[0]["params"] == weights
        assert {param: dict(state) for param, state in pair[0].state.items()} == states
    optimizer = ZeroOptimizer(model, pair[:1])
    train(model, [optimizer], range(2, 3))
    assert {state["step"].item() for state in pair[0].state.values()} == {3.0}


class Normalizes(AdamW):
    """AdamW that is element-wise, unless an argument that is not in its defaults says otherwise."""

    def __init__(self, params: Any, lr: float = 0.1, is_normalized: bool = False):
        super().__init__(params, lr=lr)
        self.is_normalized = is_normalized

    def step(self, closure: None = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param.grad = param.grad / param.grad.norm() if self.is_normalized else param.grad
        super().step()


def test_an_optimizer_is_tried_with_its_attributes():
    model = wrap()
    assert ZeroOptimizer(model, Normalizes(model.module.parameters()))
    model = wrap()
    with pytest.raises(ConfigError, match="Normalizes is not element-wise"):
        ZeroOptimizer(model, Normalizes(model.module.parameters(), is_normalized=True))


class Scaled(nn.Module):
    """A layer with a factor, which is a parameter without a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_states_of_a_parameter_without_a_dim_go_on():
    plain, own = Scaled(), Scaled()
    own.load_state_dict(plain.state_dict())
    expected, made = (AdamW(module.parameters(), lr=0.1) for module in (plain, own))
    train(plain, [expected], range(2))
    train(own, [made], range(2))
    model = wrap(own)
    optimizer = ZeroOptimizer(model, made)
    torch.testing.assert_close(train(model, [optimizer], range(2, 4)), train(plain, [expected], range(2, 4)))


METHODS = [Muon, Soap, AdamW8bit, AdamWBf16]


def old_groups(module: nn.Module) -> list[dict[str, Any]]:
    weights, biases = weights_and_biases(module)
    return [{"params": biases, "update": "adamw", "weight_decay": 0.0}, {"params": weights}]


@pytest.mark.parametrize("kind", METHODS)
def test_groups_with_the_old_word_warn_and_are_a_list_in_their_order(kind):
    model, other = wrap(), wrap()
    with pytest.warns(FutureWarning, match=rf"\[{kind.__name__}\(matrices, ...\), Cautious") as caught:
        old = ZeroOptimizer(model, kind, old_groups(model.module), lr=0.1, betas=(0.8, 0.9), clip_norm=1.0)
    assert caught[0].filename == __file__
    weights, biases = weights_and_biases(other.module)
    of_weights = {"betas": (0.8, 0.9)} if "betas" in kind.own_defaults else {}
    pair = [CautiousAdamW(biases, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0), kind(weights, lr=0.1, **of_weights)]
    new = ZeroOptimizer(other, pair, clip_norm=1.0)
    for group in old.param_groups[0], new.param_groups[0]:
        assert {param.dim() for param in group["params"]} == {1}
    found, expected = train(model, [old], range(3)), train(other, [new], range(3))
    assert all(found[name].equal(param) for name, param in expected.items())


@pytest.mark.parametrize("kind", METHODS)
def test_a_checkpoint_of_groups_with_the_old_word_is_loaded(kind, tmp_path, monkeypatch, caplog):
    """It names one class, and its groups may have another order than those of the list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = wrap()
        optimizer = ZeroOptimizer(model, kind, old_groups(model.module), lr=0.1)
    train(model, [optimizer], range(2))
    with monkeypatch.context() as patch:
        patch.setattr(rank_state, "class_names", lambda _: kind.__name__)
        save(tmp_path, model, optimizer)
    expected = train(model, [optimizer], range(2, 4))
    model = wrap()
    weights, biases = weights_and_biases(model.module)
    pair = [kind(weights, lr=0.1), CautiousAdamW(biases, lr=0.1, weight_decay=0.0)]
    optimizer = ZeroOptimizer(model, pair)
    load(tmp_path, model, optimizer)
    assert "which may have had another order: the settings of groups" in caplog.text
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]  # not loaded
    found = train(model, [optimizer], range(2, 4))
    if kind is not AdamWBf16:  # it rounds by the numbers of parameters
        assert all(found[name].equal(param) for name, param in expected.items())
