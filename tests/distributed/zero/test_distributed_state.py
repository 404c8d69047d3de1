"""Checkpoints of `torch.distributed.checkpoint`: from here to here, and to FSDP2, at other layouts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.ranks import run_cases, run_ranks
from zero import (
    AdamW8bit,
    ConfigError,
    DistributedState,
    ZeroConfig,
    ZeroDataParallel,
    ZeroOptimizer,
    export,
    full_state_dict,
    load,
    load_distributed,
    save,
)

GLOBAL_BATCH = 8


def module(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a module whose parameters have one to four dims and a buffer; shards begin inside rows."""
    torch.manual_seed(1)
    conv = nn.Sequential(nn.Unflatten(1, (1, 3, 5)), nn.Conv2d(1, 3, 2), nn.Flatten())
    norm = nn.BatchNorm1d(7, track_running_stats=False)
    norm.weight.requires_grad_(False)
    return nn.Sequential(conv, nn.Linear(24, 7), norm, nn.Linear(7, 3)).to(dtype)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in module.parameters() if param.requires_grad]
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}]


def steps(model: Any, optimizer: Any, numbers: range, rank: int, size: int) -> Iterator[float]:
    for number in numbers:
        inputs = torch.randn(GLOBAL_BATCH, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        inputs = inputs.to(next(model.parameters()).dtype)
        model.zero_grad()
        # Each rank has the whole batch, so that statistics and losses do not depend on the number of ranks.
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def run(
    config: ZeroConfig, dtype: torch.dtype = torch.float64
) -> tuple[ZeroDataParallel, ZeroOptimizer, tuple[int, int]]:
    data = Mesh.create(1).data
    model = ZeroDataParallel(module(dtype), data, config)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups_of(model.module), lr=1e-2)
    return model, optimizer, (data.rank, data.size)


def fsdp_run() -> tuple[nn.Module, torch.optim.Optimizer, tuple[int, int]]:
    data = Mesh.create(1).data
    model = fully_shard(module())
    return model, torch.optim.AdamW(groups_of(model), lr=1e-2), (data.rank, data.size)


def save_here(folder: Path, config: ZeroConfig) -> list[float]:
    model, optimizer, place = run(config)
    list(steps(model, optimizer, range(3), *place))
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    dcp.save({"app": DistributedState(model, optimizer)}, checkpoint_id=folder)
    return list(steps(model, optimizer, range(3, 8), *place))


def load_by_fsdp(folder: Path) -> list[float]:
    model, optimizer, place = fsdp_run()
    weights, moments = get_state_dict(model, optimizer)
    state = {"app": {"model": weights, "optim": moments}}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return list(steps(model, optimizer, range(3, 8), *place))


def test_a_run_moves_to_fsdp2(tmp_path: Path):
    (expected, *_) = run_ranks(4, save_here, tmp_path, ZeroConfig(3))
    for losses in run_ranks(2, load_by_fsdp, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-10)


class App(Stateful):
    """The application of torch's tutorial of checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, states = get_state_dict(*self.both, options=StateDictOptions(cpu_offload=True))
        return {"model": weights, "optim": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(*self.both, model_state_dict=state["model"], optim_state_dict=state["optim"])


def save_plain(folder: Path, model: Any, optimizer: Any) -> None:
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder)


def load_plain(folder: Path, model: Any, optimizer: Any) -> None:
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def save_whole(folder: Path, model: Any, optimizer: Any) -> None:
    weights, states = get_state_dict(model, optimizer, options=WHOLE)
    assert bool(weights) == bool(states) == (dist.get_rank() == 0)
    if weights:
        folder.mkdir()
        torch.save((weights, states), folder / "whole.pt")
    dist.barrier()


def load_whole(folder: Path, model: Any, optimizer: Any) -> None:
    weights, states = torch.load(folder / "whole.pt")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=options)
    optimizer.load_state_dict(states)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
WAYS = {
    "DistributedState": (
        lambda folder, *both: dcp.save({"app": DistributedState(*both)}, checkpoint_id=folder),
        lambda folder, *both: dcp.load({"app": DistributedState(*both)}, checkpoint_id=folder),
    ),
    "state_dict": (save_plain, load_plain),
    "get_state_dict": (
        lambda folder, *both: dcp.save({"app": App(*both)}, checkpoint_id=folder),
        lambda folder, *both: dcp.load({"app": App(*both)}, checkpoint_id=folder),
    ),
    "async_save": (
        lambda folder, *both: dcp.async_save({"app": App(*both)}, checkpoint_id=folder).result(),
        load_distributed,
    ),
    "full_state_dict": (save_whole, load_whole),
}


def go_on(way: str, before: Path | None, after: Path, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return the masters and moments of a run that begins or goes on, and its next losses; save it in between."""
    model, optimizer, place = run(ZeroConfig(stage, bucket_numel=40), torch.bfloat16)
    save_it, load_it = WAYS[way]
    if before is None:
        list(steps(model, optimizer, range(3), *place))
        optimizer.param_groups[0]["lr"] = 3e-3
    else:
        load_it(before, model, optimizer)
    save_it(after, model, optimizer)
    state = model.state_dict() | {
        f"{number}.{kind}": value
        for number, kinds in optimizer.state_dict()["state"].items()
        for kind, value in kinds.items()
    }
    whole = {name: value.full_tensor() for name, value in state.items()}
    return whole, list(steps(model, optimizer, range(3, 8), *place))


@pytest.mark.parametrize(("way", "first"), list(zip(WAYS, (0, 1, 2, 3, 1), strict=True)))
def test_state_dicts_go_through_any_number_of_ranks_and_stage_bit_by_bit(tmp_path: Path, way: str, first: int):
    ((expected, losses), *_) = run_ranks(2, go_on, way, None, tmp_path / "2", first)
    assert expected["1.weight"].dtype == torch.float32
    assert expected["0.step"] == 3
    for before, size in ((2, 3), (3, 1)):
        stage = (first + size // 2 + 1) % 4
        for whole, found in run_ranks(size, go_on, way, tmp_path / str(before), tmp_path / str(size), stage):
            assert whole.keys() == expected.keys()
            assert [name for name, value in whole.items() if not value.equal(expected[name])] == []
            assert found == pytest.approx(losses, rel=1e-6)


def masters(folder: Path, stage: int, shard_size: int | None) -> bool:
    """Return whether all ways to fp32 values give the same, which bf16 cannot hold, and a load gives them rounded."""
    data = Mesh.create(1, shard_size=shard_size).data
    config = ZeroConfig(stage, optimizer_over="all" if shard_size and stage > 1 else "group")
    model = ZeroDataParallel(module(torch.bfloat16), data, config)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-4)
    for _ in range(3):
        model(torch.ones(GLOBAL_BATCH, 15, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    dcp.save(DistributedState(model).state_dict(), checkpoint_id=folder / "dcp")
    export(folder / "export", model, dtype=torch.float32)
    full, rounded = full_state_dict(model, masters=True), full_state_dict(model)
    saved = {f"model.{name}": torch.zeros(value.shape) for name, value in module().state_dict().items()}
    dcp.load(saved, checkpoint_id=folder / "dcp")
    with torch.no_grad():
        blank = nn.Sequential(*module(torch.bfloat16)).apply(lambda part: [p.zero_() for p in part.parameters()])
    loaded = ZeroDataParallel(blank, data, config)
    ZeroOptimizer(loaded, torch.optim.AdamW, lr=1e-4)  # which gives it master weights
    load_distributed(folder / "dcp", loaded)
    read = full_state_dict(loaded)
    if data.rank > 0:
        return full == read == {}
    exported = {k: v for path in (folder / "export").glob("*.safetensors") for k, v in load_file(path).items()}
    is_longer = any(not value.equal(value.bfloat16().float()) for value in full.values())
    return is_longer and all(
        value.equal(exported[name])
        and value.equal(saved[f"model.{name}"])
        and value.bfloat16().equal(rounded[name])
        and rounded[name].equal(read[name])
        for name, value in full.items()
    )


def test_fp32_values_of_a_module_in_bf16_can_be_had(tmp_path: Path):
    for num_ranks, shard_size, stages in ((2, None, (0, 2, 3)), (4, 2, (1, 3))):
        cases = [(tmp_path / f"{num_ranks} {stage}", stage, shard_size) for stage in stages]
        assert run_cases(num_ranks, masters, cases) == [[True] * num_ranks] * len(stages)


def gpt_losses(folder: Path, tensor_size: int, stage: int, *, saves: bool) -> list[float]:
    mesh = Mesh.create(tensor_size)
    gpt = GPT(ModelConfig(2, 16, 2, 8, 64, dropout=0.0), ReplicatedTokens(mesh.tensor)).double()
    initialize(gpt, seed=1 if saves else 2)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, bucket_numel=1000))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, tensor=mesh.tensor)
    tokens, losses = torch.arange(18).view(2, 9), []
    for number in range(6):
        if number == 2 and saves:
            dcp.async_save(DistributedState(model, optimizer).state_dict(), checkpoint_id=folder).result()
        elif number == 2:
            load_distributed(folder, model, optimizer)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[2:]


def test_the_tensor_size_may_be_another(tmp_path: Path):
    (expected, *_) = run_ranks(4, gpt_losses, tmp_path, 2, 3, saves=True)
    for num_ranks, tensor_size, stage in ((2, 1, 1), (2, 2, 3)):
        for losses in run_ranks(num_ranks, gpt_losses, tmp_path, tensor_size, stage, saves=False):
            assert losses == pytest.approx(expected, rel=1e-10)


def weights_alone(folder: Path) -> None:
    """Save with and without the optimizer, and load weights alone from both: the optimizer there stays as it is."""
    model, optimizer, place = run(ZeroConfig(3))
    list(steps(model, optimizer, range(3), *place))
    save(folder / "weights", model)
    save(folder / "all", model, optimizer, {"step": 3})
    expected = full_state_dict(model)
    for name, extra in (("weights", {}), ("all", {"step": 3})):
        other, own, _ = run(ZeroConfig(1))
        own.param_groups[0]["lr"] = 7.0
        assert load(folder / name, other) == extra
        assert all(value.equal(expected[name]) for name, value in full_state_dict(other).items())
        assert own.param_groups[0]["lr"] == 7.0
        assert not any(own.state.values())
    with pytest.raises(ConfigError, match="has weights alone; load it without an optimizer"):
        load(folder / "weights", other, own)


def test_weights_alone_are_saved_and_loaded(tmp_path: Path):
    run_ranks(2, weights_alone, tmp_path)


def refusals(folder: Path) -> None:
    model, optimizer, _ = run(ZeroConfig(2, alignment=256))
    weights = DistributedState(model)
    dcp.save({"model": weights.state_dict()["model"]}, checkpoint_id=folder)
    with pytest.raises(ConfigError, match=r"0 tensors whose names end in state\.0\.1\.weight\.step"):
        load_distributed(folder, model, optimizer)
    other = ZeroDataParallel(nn.Sequential(nn.Sequential(nn.Identity(), nn.Conv2d(1, 3, 3))), Mesh.create(1).data)
    with pytest.raises(ConfigError, match=r"0\.1\.weight is \[3, 1, 2, 2\] there and \[3, 1, 3, 3\] here"):
        load_distributed(folder, other)
    whole = StateDictOptions(full_state_dict=True)
    state, (_, moments) = model.state_dict(), get_state_dict(model, optimizer, options=whole)
    with pytest.raises(RuntimeError, match=r"lacks \['3.bias'\] and has \['bias'\]"):
        model.load_state_dict({name.replace("3.b", "b"): value for name, value in state.items()})
    with pytest.raises(ConfigError, match=r"3\.weight is \[7\] in the state dict and \[3, 7\] here"):
        model.load_state_dict({"3.weight": torch.ones(7)}, strict=False)
    with pytest.raises(ConfigError, match=r"1\.weight is cut for another layout"):
        model.load_state_dict(run(ZeroConfig(3))[0].state_dict())
    with pytest.raises(ConfigError, match="full_state_dict=True of set_optimizer_state_dict cannot divide"):
        set_optimizer_state_dict(model, optimizer, moments, options=whole)
    for use in (lambda part: part + 1, lambda part: torch.save(part, folder / "part.pt")):
        with pytest.raises((RuntimeError, TypeError), match=r"`full_tensor\(\)`"):
            use(state["3.weight"])
    del optimizer
    with pytest.raises(ConfigError, match="is not one value for each element"):
        DistributedState(model, ZeroOptimizer(model, AdamW8bit, lr=1e-3)).state_dict()


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path):
    run_ranks(2, refusals, tmp_path)
