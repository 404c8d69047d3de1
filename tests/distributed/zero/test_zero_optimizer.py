"""The step: clipping, skipped fp16 steps, optimizers of torch, saved and loaded state; the host waits for no value."""

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.train_step import train_step
from parallel.mesh import Axis, Mesh
from tests.models import VOCAB, build
from tests.ranks import run_ranks
from tests.twins import ALL_STAGES, Twins, assert_same_bits, configs, next_token_loss, params_of
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.state.owned_state import common_state, describe_state, load_common_state, load_owned_state, owned_state
from zero.state.saved_state import SavedState, TensorRank, rank_file
from zero.state.tensor_file import write_tensors
from zero.step import bucket_groups
from zero.step.loss_scale import LossScale

CLIP_NORMS = [math.inf, 0.5, 1e3]


def small_gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    return build("gpt", dtype=dtype)


def check_clipping() -> list[list[float]]:
    """Compare with torch's clipping; return the norms, which must have the same bits on every rank."""
    norms = []
    for config, clip_norm in itertools.product(configs(*ALL_STAGES, bucket_numel=[5000]), CLIP_NORMS):
        twins = Twins(small_gpt(), config, torch.optim.SGD, clip_norm=clip_norm, lr=0.1)
        twins.train(2)
        next_token_loss(twins.model, 2, twins.data.rank).backward()
        norms.append(twins.optimizer.step().item())
    return norms


@pytest.mark.parametrize("data_size", [1, 2])
def test_clipping_equals_torchs(data_size):
    first, *others = run_ranks(data_size, check_clipping)
    assert all(norms == first for norms in others)


class CountingSGD(torch.optim.Optimizer):
    """SGD with one step counter per parameter group, as apex's FusedAdam has, by which it divides the learning rate.

    A counter is made in the first step; groups without parameters are skipped.
    """

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["step"])


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (CountingSGD, {}),
]


def matrices_and_vectors(module: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with settings of their own; the position embedding is in neither and keeps its values."""
    params = [param for name, param in module.named_parameters() if "position" not in name]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "lr": 3e-3},
    ]


def check_optimizer(optimizer: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    for config in configs(1, 3, bucket_numel=[5000]):
        twins = Twins(small_gpt(), config, optimizer, groups=matrices_and_vectors, **settings | {"lr": 1e-2})
        before = params_of(twins.model)["position_embedding.weight"]
        for step in range(4):
            for either in (twins.optimizer.inner, twins.plain_optimizer):  # a schedule changes the first group's only
                either.param_groups[0]["lr"] = 1e-2 / (step + 1)
            twins.train(1, first=step)
        assert_same_bits({"": params_of(twins.model)["position_embedding.weight"]}, {"": before})


@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", value))
def test_elementwise_optimizers_equal_one_process(optimizer, settings):
    run_ranks(2, check_optimizer, optimizer, settings)


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
    return owned_state(model, optimizer) | common_state(model, optimizer)


def check_overflows_leave_no_trace(optimizer: Optimizer, stages: list[int]) -> None:
    """Parameters, moments and Adam's step counter are as if the skipped steps had not been run."""
    for config in configs(*stages, bucket_numel=[5000]):
        model, stepper = train_fp16(config, optimizer, (True, False, True, True, False, False))
        expected_model, expected_stepper = train_fp16(config, optimizer, (False, False, False))
        assert_same_bits(params_of(model), params_of(expected_model))
        counters = {"num_skipped", "loss_scale.num_good"}
        state, expected = all_state(model, stepper), all_state(expected_model, expected_stepper)
        assert (state["num_skipped"].item(), state["loss_scale.num_good"].item()) == (3, 2)
        assert_same_bits(*({k: v for k, v in s.items() if k not in counters} for s in (state, expected)))
        assert {tensor.item() for name, tensor in state.items() if ".step." in name} <= {3.0}


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        ((torch.optim.AdamW, {"fused": True}), ALL_STAGES),
        ((torch.optim.AdamW, {"foreach": True}), [1, 3]),
        ((torch.optim.SGD, {"momentum": 0.9}), [0, 2]),
        ((torch.optim.SGD, {"momentum": 0.9, "fused": True}), [1, 3]),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(optimizer, stages):
    run_ranks(2, check_overflows_leave_no_trace, optimizer, stages)


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


def check_step_waits_for_nothing(dtype: torch.dtype) -> None:
    mesh = Mesh.create(tensor_size=1)
    for config in configs(*ALL_STAGES, bucket_numel=[5000]):
        model = ZeroDataParallel(small_gpt(dtype), mesh.data, config)
        scale = LossScale(64.0, is_dynamic=dtype is torch.float16)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, loss_scale=scale, clip_norm=1.0, fused=True)
        for step in range(2):
            with NoWaiting():
                train_step(model, optimizer, tokens_of(step, mesh.data.rank), mesh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_never_reads_the_value_of_a_tensor(dtype):
    run_ranks(2, check_step_waits_for_nothing, dtype)


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


def start(config: ZeroConfig, dtype: torch.dtype, offset: int) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    """Return a model and optimizer whose weights, buffers and loss scale depend on `offset`."""
    module = build("toy", dtype=dtype)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(offset)
    model = ZeroDataParallel(module, Mesh.create(tensor_size=1).data, config)
    loss_scale = LossScale(4.0 + offset, is_dynamic=True, growth_interval=2)
    return model, ZeroOptimizer(model, torch.optim.AdamW, loss_scale=loss_scale, lr=1e-2, fused=True)


def take_steps(model: ZeroDataParallel, optimizer: ZeroOptimizer, steps: range) -> None:
    for step in steps:
        (next_token_loss(model, step, dist.get_rank()) * optimizer.loss_scale.scale).backward()
        optimizer.step()


def copy_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def check_state_continues_bit_for_bit(folder: Path, buckets_of: dict[torch.dtype, list[int | None]]) -> None:
    pairs = [(d, config) for d, sizes in buckets_of.items() for config in configs(*ALL_STAGES, bucket_numel=sizes)]
    for dtype, config in pairs:
        model, optimizer = start(config, dtype, offset=0)
        take_steps(model, optimizer, range(1))
        saved = copy_of(all_state(model, optimizer))
        write_tensors(rank_file(folder, dist.get_rank()), saved)
        dist.barrier()
        take_steps(model, optimizer, range(1, 4))

        other_model, other_optimizer = start(config, dtype, offset=1)
        files = SavedState(folder, describe_state(model, dist.get_world_size(), 1))
        load_owned_state(other_model, other_optimizer, files, TensorRank())
        load_common_state(other_model, other_optimizer, files.file(dist.get_rank()))
        assert_same_bits(all_state(other_model, other_optimizer), saved)
        take_steps(other_model, other_optimizer, range(1, 4))
        assert_same_bits(params_of(other_model), params_of(model))
        assert_same_bits(all_state(other_model, other_optimizer), all_state(model, optimizer))
        dist.barrier()


@pytest.mark.parametrize(
    "buckets_of",
    [
        {torch.float32: [None], torch.bfloat16: [500]},
        pytest.param({torch.float32: [500], torch.bfloat16: [None]}, marks=pytest.mark.full),
    ],
    ids=["few", "rest"],
)
def test_loaded_state_continues_bit_for_bit(tmp_path, buckets_of):
    run_ranks(2, check_state_continues_bit_for_bit, tmp_path, buckets_of)


def test_an_optimizer_takes_a_list_of_parameters_and_discards_gradients_as_torchs_do():
    model = ZeroDataParallel(nn.Linear(4, 4), Axis.trivial("data"), ZeroConfig())
    optimizer = ZeroOptimizer(model, torch.optim.SGD, model.module.parameters(), lr=0.1)
    before = params_of(model)
    for set_to_none in (True, False):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert optimizer.step() == 0
    assert_same_bits(params_of(model), before)


def test_what_is_no_optimizer_for_the_model_is_refused():
    model = ZeroDataParallel(nn.Linear(4, 4).requires_grad_(False), Axis.trivial("data"), ZeroConfig())
    with pytest.raises(ValueError, match="none of the 2 parameters of the optimizer is trainable"):
        ZeroOptimizer(model, torch.optim.SGD)
    with pytest.raises(TypeError, match=r"takes an axis, such as `mesh.data`, not an object of class object"):
        ZeroDataParallel(nn.Linear(4, 4), object(), ZeroConfig())


@pytest.mark.parametrize(
    ("is_dynamic", "settings", "warns"),
    [(False, {}, True), (True, {}, False), (False, {"warn_skipped": False}, False)],
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
        patch.setattr(bucket_groups, "GROUPED_SHARE", share)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, clip_norm=0.5, lr=1e-2, fused=True)
    calls: list[int] = []
    step_inner = optimizer.inner.step
    optimizer.inner.step = lambda: [calls.append(step), step_inner()]  # type: ignore[assignment]
    for step in range(3):
        next_token_loss(model, step, data.rank).backward()
        optimizer.step()
    return [calls.count(step) for step in range(3)], [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize(
    ("dtype", "types"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"accumulate_dtype": "bf16"})],
    ids=["fp32", "gradients in fp32", "gradients that are cast"],
)
def test_small_shards_are_updated_together_to_the_bit(dtype, types):
    """Two ranks have as many elements as two buckets' shards in a group if a group may have those of a bucket."""
    for alone, together in zip(*(run_ranks(2, train_in_groups, n, dtype, types) for n in (8, 1)), strict=True):
        assert together[0] == [math.ceil(n / 2) for n in alone[0]]
        assert_same_bits(together[1], alone[1])


def test_buckets_of_different_types_are_updated_apart(monkeypatch):
    """Buckets have 64, 64 and 32 elements in fp32, and 32 in fp64; the last two would have room in one group."""
    monkeypatch.setattr(bucket_groups, "GROUPED_SHARE", 1)
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
