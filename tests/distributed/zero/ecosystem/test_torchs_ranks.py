"""Models that are divided over torch's own objects: meshes, groups, all ranks or some of them; beside FSDP2."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel.torch_ranks import as_axis
from parallel.validation.errors import ConfigError
from tests.ranks import run_ranks
from tests.scenarios import Blocks
from tests.twins import params_of
from zero import (
    OffloadConfig,
    ShardedInit,
    ZeroConfig,
    ZeroDataParallel,
    ZeroOptimizer,
    full_state_dict,
    join,
    load,
    save,
)

RANKS = {"some ranks": [1, 3], "a mesh of some ranks": [0, 2, 3]}
NUM_STEPS, SETTINGS = 3, {"lr": 0.1, "momentum": 0.9}


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def backward(module: nn.Module, step: int, rank: int, divisor: int = 1) -> None:
    ((module(batch(step, rank)) - 0.5).square().mean() / divisor).backward()


def trained_by_torch(module: nn.Module, size: int) -> dict[str, Tensor]:
    """Return the parameters after training in one process, on the batches of `size` ranks."""
    optimizer = torch.optim.SGD(module.parameters(), **SETTINGS)
    for step in range(NUM_STEPS):
        for rank in range(size):
            backward(module, step, rank, size)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in module.named_parameters()}


def train_and_resume(ranks: Any, stage: int, module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Train, and save and load a checkpoint after the first step; return the parameters."""
    model = ZeroDataParallel(module, ranks, ZeroConfig(stage, bucket_numel=50))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, **SETTINGS)
    for step, weight in join(range(NUM_STEPS), ranks):
        backward(model, step, model.data.rank, int(weight))
        optimizer.step()
        if step == 0:
            save(folder, model, optimizer)
            load(folder, model, optimizer)
    return params_of(model)


def check_all_objects(folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    objects: dict[str, Any] = {
        "nothing": None,
        "group": dist.group.WORLD,
        "mesh": init_device_mesh("cpu", (4,)),
        "replicas": mesh,
        "a dim": mesh["shard"],
        "some ranks": dist.new_group(RANKS["some ranks"]),
        "a mesh of some ranks": DeviceMesh("cpu", RANKS["a mesh of some ranks"]),
    }
    for number, (name, ranks) in enumerate(objects.items()):
        torch.manual_seed(0)
        module = Blocks()
        if dist.get_rank() not in RANKS.get(name, range(4)):
            with pytest.raises(ConfigError, match=f"^data: rank {dist.get_rank()} "):
                ZeroDataParallel(module, ranks)
            continue
        data = as_axis(ranks)
        expected = trained_by_torch(copy.deepcopy(module), data.size)
        for stage in (number % 3, 3):
            of_group = folder / f"{name} {stage} {dist.get_rank() - data.rank if name == 'a dim' else ''}"
            found = train_and_resume(ranks, stage, copy.deepcopy(module), of_group)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        initial = {name: param.detach() for name, param in module.named_parameters()}
        torch.manual_seed(0)
        with ShardedInit(ranks, ZeroConfig(3).policy) as init:
            module = Blocks()
        sharded = params_of(ZeroDataParallel(module, ranks, ZeroConfig(3), init))
        torch.testing.assert_close(sharded, initial)


def test_torchs_meshes_and_groups_train_as_one_process(tmp_path: Path):
    run_ranks(4, check_all_objects, tmp_path)


class Normed(Blocks):
    """Blocks with a buffer, which must keep its type, and an output that depends on its digits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(1 + 2.0**-20))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.bfloat16
        return super().forward(x).float() + self.offset


def check_mixed_precision() -> None:
    """Parameters and inputs are cast as by FSDP2's policy; master weights begin with all digits."""
    torch.manual_seed(0)
    module, rank = Normed(), dist.get_rank()
    initial = {name: param.detach().clone() for name, param in module.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    reference: Any = copy.deepcopy(module)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*reference.blocks, reference):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizers: dict[Any, Any] = {reference: torch.optim.SGD(reference.parameters(), **SETTINGS)}
    for stage, offload in ((0, "accelerator"), (1, "accelerator"), (2, "host"), (3, "accelerator"), (3, "host")):
        config = ZeroConfig(stage, bucket_numel=50, reduce_dtype=torch.float32)
        model = ZeroDataParallel(
            copy.deepcopy(module), mesh, config, offload=OffloadConfig(offload), param_dtype=torch.bfloat16
        )
        found = full_state_dict(model, masters=True)
        torch.testing.assert_close({name: found[name] for name in initial if rank == 0}, initial if rank == 0 else {})
        optimizers[model] = ZeroOptimizer(model, torch.optim.SGD, **SETTINGS)
    torch.manual_seed(0)
    with ShardedInit(mesh, ZeroConfig(3).policy) as init:
        built = Normed()
    found = full_state_dict(
        ZeroDataParallel(built, mesh, ZeroConfig(3), init, param_dtype=torch.bfloat16), masters=True
    )
    assert all(found[name].equal(initial[name]) for name in initial if rank == 0)
    for step in range(NUM_STEPS):
        for model, optimizer in optimizers.items():
            (model(batch(step, rank).float()) - 0.5).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: param.full_tensor().detach() for name, param in reference.named_parameters()}
    for model in list(optimizers)[1:]:
        found = full_state_dict(model, masters=True)
        for name in initial if rank == 0 else ():
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
        assert all(param.dtype is torch.bfloat16 for param in model.module.parameters())
        assert model.module.offset.dtype is torch.float32
    with pytest.raises(ConfigError, match=r"param_dtype=torch\.int8"):
        ZeroDataParallel(nn.Linear(2, 2), mesh, param_dtype=torch.int8)


def test_mixed_precision_is_that_of_fsdp2():
    run_ranks(2, check_mixed_precision)


def refuse_meshes() -> None:
    for mesh in (
        DeviceMesh("cpu", [[0, 1]]),
        DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("replicate", "shard")),
        DeviceMesh("cpu", [[[0, 1]]], mesh_dim_names=("a", "b", "c")),
    ):
        with pytest.raises(ConfigError, match=r"^data=.*mesh_dim_names"):
            ZeroDataParallel(nn.Linear(2, 2), mesh)


def test_other_meshes_are_refused():
    run_ranks(2, refuse_meshes)


def test_a_process_alone_needs_no_ranks_and_no_settings():
    assert ZeroDataParallel(nn.Linear(2, 2)).data.size == 1
    with pytest.raises(TypeError, match="DeviceMesh"):
        ZeroDataParallel(nn.Linear(2, 2), "data")


def test_torchs_types_stand_for_their_names():
    types = {"accumulate_dtype": torch.float32, "reduce_dtype": torch.bfloat16}
    assert ZeroConfig(2, **types) == ZeroConfig(2, accumulate_dtype="fp32", reduce_dtype="bf16")
    with pytest.raises(ConfigError, match=r"reduce_dtype=torch\.float64.*fp16"):
        ZeroConfig(2, reduce_dtype=torch.float64)


def backend_without_a_name() -> str | None:
    dist.init_process_group()
    return as_axis(None).backend


def test_the_backend_of_a_group_that_was_started_without_a_name_is_that_of_the_device():
    assert run_ranks(2, backend_without_a_name, init_process_group=False) == ["gloo"] * 2
