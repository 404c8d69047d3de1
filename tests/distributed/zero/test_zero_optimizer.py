"""The step: clipping, skipped fp16 steps, optimizers of torch, saved and loaded state; the host waits for no value."""

import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.train_step import train_step
from parallel.mesh import Axis, Mesh
from parallel.validation.errors import ConfigError
from tests.distributed.zero.scenarios.test_optimizers import ScheduleFreeSGD
from tests.models import VOCAB, build
from tests.ranks import run_cases, run_ranks
from tests.twins import ALL_STAGES, Twins, assert_same_bits, configs, next_token_loss, params_of
from zero.checkpoint.checkpoint import Saver, load, save
from zero.checkpoint.rank_state import RankState
from zero.core.step import bucket_groups
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


def small_gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    return build("gpt", dtype=dtype)


Optimizer = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def train_fp16(
    config: ZeroConfig, optimizer: Optimizer, overflows: tuple[bool, ...]
) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    """Train on batches 0, 1, ...; in each of the `overflows` the last rank has one infinite gradient element."""
    data = Mesh.create(tensor_size=1).data
    model = ZeroDataParallel(small_gpt(torch.float16), data, config)
    loss_scale = LossScale(8.0, is_dynamic=True, hysteresis=3)  # so many overflows never follow each other here
    kind, settings = optimizer
    stepper = ZeroOptimizer(model, kind, loss_scale=loss_scale, **settings | {"lr": 1e-2})
    good_steps = itertools.count()
    for overflow in overflows:
        loss = next_token_loss(model, 99 if overflow else next(good_steps), data.rank) * loss_scale.scale
        is_infinite = overflow and data.rank == data.size - 1
        hook = model.module.final_norm.bias.register_hook(
            lambda grad, last=math.inf if is_infinite else 1.0: torch.cat([grad[:-1], grad[-1:] * last])
        )
        loss.backward()
        norm = stepper.step()
        hook.remove()
        assert bool(norm.isfinite()) is not overflow
    return model, stepper


def all_state(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    state = RankState(model, optimizer)
    return state.owned() | state.common()


def check_overflows_leave_no_trace(optimizer: Optimizer, stages: list[int]) -> None:
    """Parameters, moments and Adam's step counter are as if the skipped steps had not been run."""
    for config in configs(*stages, bucket_numel=[5000]):
        model, stepper = train_fp16(config, optimizer, (True, False, True, True, False))
        expected_model, expected_stepper = train_fp16(config, optimizer, (False, False))
        assert_same_bits(params_of(model), params_of(expected_model))
        counters = {"num_skipped", "loss_scale.num_good"}
        state, expected = all_state(model, stepper), all_state(expected_model, expected_stepper)
        assert (state["num_skipped"].item(), state["loss_scale.num_good"].item()) == (3, 1)
        assert_same_bits(*({k: v for k, v in s.items() if k not in counters} for s in (state, expected)))
        assert {tensor.item() for name, tensor in state.items() if ".step." in name} <= {2.0}


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    cases = [
        ((torch.optim.AdamW, {"fused": True}), [0, 3]),
        ((torch.optim.AdamW, {"foreach": True}), [1]),
        ((torch.optim.SGD, {"momentum": 0.9}), [2]),
        ((torch.optim.SGD, {"momentum": 0.9, "fused": True}), [1]),
    ]
    run_cases(2, check_overflows_leave_no_trace, cases)


def check_any_scale_gives_the_same_parameters(dtype: torch.dtype) -> None:
    """Powers of two cancel exactly if nothing underflows: norm, clipping and update are those without a scale."""
    data = Mesh.create(tensor_size=1).data
    found = []
    for scale in (1.0, 1024.0):
        model = ZeroDataParallel(small_gpt(dtype), data, ZeroConfig(2, 5000))
        loss_scale = LossScale(scale)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=0.5, loss_scale=loss_scale, lr=1e-2, fused=True)
        for step in range(2):
            (next_token_loss(model, step, data.rank) * loss_scale.scale).backward()
            norm = optimizer.step()
        found.append(params_of(model) | {"norm": norm})
    assert_same_bits(found[0], found[1])


def test_the_loss_scale_cancels():
    run_ranks(2, check_any_scale_gives_the_same_parameters, torch.bfloat16)


class NoWaiting(TorchDispatchMode):
    """A dispatch mode that raises if a tensor's value is read: on a GPU the host would wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            raise AssertionError(f"{func} reads a tensor's value")
        return func(*args, **kwargs or {})


def tokens_of(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return list(torch.randint(0, VOCAB, (2, 2, 9), generator=generator))  # two micro-batches


def check_step_waits_for_nothing(dtype: torch.dtype, stages: list[int]) -> None:
    mesh = Mesh.create(tensor_size=1)
    for config in configs(*stages, bucket_numel=[5000]):
        model = ZeroDataParallel(small_gpt(dtype), mesh.data, config)
        scale = LossScale(64.0, is_dynamic=dtype is torch.float16)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, loss_scale=scale, clip_norm=1.0, fused=True)
        for step in range(2):
            with NoWaiting():
                train_step(model, optimizer, tokens_of(step, mesh.data.rank), mesh)


def test_a_step_never_reads_the_value_of_a_tensor():
    run_cases(2, check_step_waits_for_nothing, [(torch.float16, ALL_STAGES), (torch.bfloat16, [2])])


def test_a_step_tells_the_model_the_factor_of_the_loss():
    """The model computes half-precision gradients of its logits before backward brings this factor."""
    mesh = Mesh.create(tensor_size=1)
    model = ZeroDataParallel(small_gpt(torch.float16), mesh.data, ZeroConfig())
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, loss_scale=LossScale(2.0**10), fused=True)
    factors = []
    model.module.register_forward_pre_hook(lambda _module, args: factors.append(args[2].item()))
    train_step(model, optimizer, [*tokens_of(0, 0), *tokens_of(1, 0)], mesh)
    assert factors == [2.0**10 / len(factors)] * len(factors)


def test_an_optimizer_that_cannot_take_the_flag_waits_for_it():
    mesh = Mesh.create(tensor_size=1)
    model = ZeroDataParallel(small_gpt(torch.float16), mesh.data, ZeroConfig())
    optimizer = ZeroOptimizer(model, torch.optim.SGD, loss_scale=LossScale(2.0, is_dynamic=True))
    with NoWaiting(), pytest.raises(AssertionError, match="reads a tensor's value"):
        train_step(model, optimizer, tokens_of(0, 0), mesh)


def test_what_is_no_optimizer_for_the_model_is_refused():
    model = ZeroDataParallel(nn.Linear(4, 4).requires_grad_(False), Axis.trivial("data"), ZeroConfig())
    with pytest.raises(ValueError, match="none of the 2 parameters of the optimizer is trainable"):
        ZeroOptimizer(model, torch.optim.SGD)


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_step_of_the_inner_optimizer_is_refused_and_its_zero_grad_discards(stage):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig(stage))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD inside a ZeroOptimizer .* call `step` of the Zero"):
        optimizer.inner.step()
    assert optimizer.step() > 0
    model(torch.ones(2, 4)).sum().backward()
    optimizer.inner.zero_grad()
    assert optimizer.step() == 0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ScheduleFreeSGD])
def test_the_states_of_an_optimizer_are_freed_with_it(kind):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    optimizer = ZeroOptimizer(model, kind, lr=0.1)
    inner = weakref.ref(optimizer.inner)
    del optimizer
    assert inner() is None


def counters_of_groups(folder: Path) -> list[list[int]]:
    """Train two groups, of which each rank owns one; return their counters after steps, and after loading them."""

    def start() -> tuple[ZeroDataParallel, ZeroOptimizer]:
        module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model = ZeroDataParallel(module, None, ZeroConfig(2))
        groups = [{"params": layer.parameters()} for layer in module]
        return model, ZeroOptimizer(model, ScheduleFreeSGD, groups, warn_skipped=False)

    model, optimizer = start()
    optimizer.inner.train()
    for factor in (1.0, math.inf, 1.0, 1.0):
        (model(torch.ones(2, 8)).mean() * factor).backward()
        optimizer.step()
    loaded = start()
    load(save(folder, model, optimizer), *loaded)
    return [[group["k"] for group in one.param_groups] for one in (optimizer, loaded[1])]


def test_counters_of_a_group_are_the_same_on_ranks_that_own_nothing_of_it(tmp_path):
    assert run_ranks(2, counters_of_groups, tmp_path / "saved") == [[[3, 3], [3, 3]]] * 2


def check_modes_in_half_precision(folder: Path) -> None:
    """Master weights change mode in fp32, also after loading, and parameters are rounded from them."""
    for config in [*configs(*ALL_STAGES), ZeroConfig(1, 500, overlap_gather=True)]:
        twins = Twins(small_gpt(torch.bfloat16), config, ScheduleFreeSGD, lr=0.25)
        masters = {name: nn.Parameter(param.float()) for name, param in twins.plain.named_parameters()}
        expected = ScheduleFreeSGD(masters.values(), lr=0.25)

        def train(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> None:
            optimizer.inner.train()
            with model.gathered() as module:
                loss = sum(param.sum() * 0.5 for param in module.parameters())
            loss.backward()
            optimizer.step()

        for _ in range(3):
            train(twins.model, twins.optimizer)
            expected.train()
            for param in masters.values():
                param.grad = torch.full_like(param, 0.5)
            expected.step()
        save(folder, twins.model, twins.optimizer)
        expected.eval()
        model = ZeroDataParallel(small_gpt(torch.bfloat16), twins.data, config)
        optimizer = ZeroOptimizer(model, ScheduleFreeSGD, lr=0.25)
        load(folder, model, optimizer)
        for own, stepper in ((twins.model, twins.optimizer), (model, optimizer)):
            stepper.inner.eval()
            assert_same_bits(params_of(own), {name: param.bfloat16() for name, param in masters.items()})


def test_an_optimizer_changes_mode_in_half_precision(tmp_path):
    run_ranks(2, check_modes_in_half_precision, tmp_path)


def check_that_undeclared_parts_are_refused() -> None:
    mesh = Mesh.create(tensor_size=2)
    for stage in (1, 3):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in module.parameters():
            nn.init.constant_(param, 0.5)
        module[1].bias.data[0] = mesh.tensor.rank  # owned by the first data rank
        model = ZeroDataParallel(module, mesh.data, ZeroConfig(stage))
        with pytest.raises(ConfigError, match=r"^1 parameters, such as 1\.bias, differ along the axis `tensor`"):
            ZeroOptimizer(model, torch.optim.SGD, tensor=mesh.tensor)
        module[1].split_dims = {"bias": 0}
        ZeroOptimizer(model, torch.optim.SGD, tensor=mesh.tensor)


def test_parameters_that_differ_along_the_tensor_axis_are_refused_unless_they_are_declared():
    run_ranks(4, check_that_undeclared_parts_are_refused)


def test_an_argument_of_another_class_is_refused_by_name(tmp_path):
    axis, config = Axis.trivial("data"), ZeroConfig()
    module = nn.Linear(4, 4)
    model = ZeroDataParallel(nn.Linear(4, 4), axis, config)
    optimizer = ZeroOptimizer(model, torch.optim.SGD)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: ZeroDataParallel(module, object(), config), "`data` .* object, not of class ProcessGroup"),
        (lambda: ZeroDataParallel(module, axis, {"stage": 2}), "`config` .* dict, not of class ZeroConfig"),
        (lambda: ZeroDataParallel(module, axis, config, offload="host"), "`offload` .* str, .* OffloadConfig"),
        (lambda: ZeroOptimizer(model.module, torch.optim.SGD), "`model` .* Linear, not of class ZeroDataParallel"),
        (lambda: ZeroOptimizer(model, torch.optim.SGD, loss_scale=2.0), "`loss_scale` .* float, .* LossScale"),
        (lambda: ZeroOptimizer(model, torch.optim.SGD, tensor=1), "`tensor` .* int, not of class Axis"),
        *((lambda kind=kind: ZeroOptimizer(model, kind), "(?i)class") for kind in (3, "SGD", nn.Linear)),
        (lambda: Saver(model, optimizer.inner), "`optimizer` .* SGD, not of class ZeroOptimizer"),
        (lambda: load(save(tmp_path, model, optimizer), module, optimizer), "`model` .* Linear, .* ZeroDataParallel"),
    ]
    for call, message in cases:
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize("clip_norm", [0, 0.0, -1.0, math.nan])
def test_a_clip_norm_that_is_not_positive_is_refused(clip_norm):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    with pytest.raises(ConfigError, match=rf"clip_norm={clip_norm} of ZeroOptimizer .* choose None"):
        ZeroOptimizer(model, torch.optim.SGD, clip_norm=clip_norm)


@pytest.mark.parametrize(("keyword", "name"), [({"lrr": 0.1}, "lrr"), ({"momentum": "0.9"}, "str"), ({"lr": -1}, "-1")])
def test_settings_that_the_optimizer_does_not_take_are_told_in_its_words(keyword, name):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    with pytest.raises(ValueError, match=name) as caught:
        ZeroOptimizer(model, torch.optim.SGD, **keyword)
    assert "flat pieces" not in str(caught.value)


@pytest.mark.parametrize(
    ("is_dynamic", "settings", "warns"), [(False, {}, True), (True, {}, False), (False, {"warn_skipped": False}, False)]
)
def test_a_skipped_step_warns_unless_it_is_expected(is_dynamic, settings, warns):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    scale = LossScale(2.0, is_dynamic=is_dynamic)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, loss_scale=scale, **settings)
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [(warning.category, warning.filename) for warning in caught] == [(RuntimeWarning, __file__)] * warns


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_a_schedule_does_not_warn_of_a_first_step_that_is_skipped(kind, settings):
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    stepper = ZeroOptimizer(model, kind, warn_skipped=False, **settings)
    schedule = lr_scheduler.CosineAnnealingLR(stepper.inner, T_max=4)
    before = params_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(torch.ones(2, 4)).sum() * math.nan).backward()
        stepper.step()
        schedule.step()
    assert_same_bits(params_of(model), before)
    assert stepper.num_skipped == 1


def train_in_groups(share: int, dtype: torch.dtype, types: dict[str, Any]) -> tuple[list[int], list[Tensor]]:
    """Return the number of calls of the torch optimizer in each step, and the parameters after three."""
    data = Mesh.create(tensor_size=1).data
    model = ZeroDataParallel(small_gpt(dtype), data, ZeroConfig(2, bucket_numel=2000, **types))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_groups, "GROUP_DIVISOR", share)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=0.5, lr=1e-2, fused=True)
    calls: list[int] = []
    step_inner = optimizer.inner.step
    optimizer.inner.step = lambda: [calls.append(step), step_inner()]  # type: ignore[assignment]
    for step in range(3):
        next_token_loss(model, step, data.rank).backward()
        optimizer.step()
    return [calls.count(step) for step in range(3)], [p.detach().clone() for p in model.module.parameters()]


def test_small_shards_are_updated_together_to_the_bit():
    """Two ranks have as many elements as two buckets' shards in a group if a group may have those of a bucket."""
    bf16 = torch.bfloat16
    types = (torch.float32, {}), (bf16, {}), (bf16, {"accumulate_dtype": "bf16"})  # these gradients are cast
    found = run_cases(2, train_in_groups, [(share, *case) for case in types for share in (8, 1)])
    for alone, together in zip(itertools.chain(*found[::2]), itertools.chain(*found[1::2]), strict=True):
        assert together[0] == [math.ceil(n / 2) for n in alone[0]]
        assert_same_bits(together[1], alone[1])


def test_buckets_of_different_types_are_updated_apart(monkeypatch):
    """Buckets have 64, 64 and 32 elements in fp32, and 32 in fp64; the last two would have room in one group."""
    monkeypatch.setattr(bucket_groups, "GROUP_DIVISOR", 1)
    module = nn.ModuleList([nn.Linear(10, 16, bias=False), nn.Linear(4, 8, bias=False).double()])
    model = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(1, bucket_numel=64))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=1.0)
    before = params_of(model)
    numels: list[int] = []
    step_inner = optimizer.inner.step
    optimizer.inner.step = lambda: [  # type: ignore[assignment]
        numels.append(sum(param.numel() for group in optimizer.inner.param_groups for param in group["params"])),
        step_inner(),
    ]
    sum(param.sum() for param in module.parameters()).backward()
    optimizer.step()
    assert sorted(numels) == [32, 32, 64, 64]
    assert all(param.equal(before[name] - 1) for name, param in params_of(model).items())
