"""Checkpoints in the format of DeepSpeed 0.19's ZeRO, written without it: as its own package has written such ones."""

import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def _class(module: str, name: str) -> Any:
    """Return a class that pickle finds, and finds no more where the package is missing."""
    made = type(name, (), {"__module__": module})
    words = module.split(".")
    for number in range(len(words)):
        parent = ".".join(words[: number + 1])
        sys.modules.setdefault(parent, ModuleType(parent))
    setattr(sys.modules[module], name, made)
    return made


def write_deepspeed(folder: Path, stage: int, num_ranks: int, module: nn.Module, optimizer: Any) -> None:
    """Write the checkpoint of a run that has trained `module` by an Adam."""
    names = {param: name for name, param in module.named_parameters()}
    groups = [[param for param in group["params"] if param.requires_grad] for group in optimizer.param_groups]
    frozen = OrderedDict((name, p.detach()) for p, name in names.items() if not p.requires_grad)
    kinds = ("exp_avg", "exp_avg_sq")
    flats = [[_parts(list(group), stage, num_ranks) for group in groups]]
    flats += [[_parts([optimizer.state[p][kind] for p in g], stage, num_ranks) for g in groups] for kind in kinds]
    settings = [
        {k: v for k, v in g.items() if k != "params"} | {"params": [i]} for i, g in enumerate(optimizer.param_groups)
    ]
    counter = optimizer.state[groups[0][0]]["step"]
    counter = int(counter) if stage == 2 else counter  # as DeepSpeed's own Adam counts
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    scaler = _class("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")()
    vars(scaler).update(cur_scale=1024.0, cur_iter=13, last_overflow_iter=7, scale_window=1000)
    for rank in range(num_ranks):
        weights, *moments = ([group[rank] for group in of_kind] for of_kind in flats)
        state = {
            number: {"step": counter, **{kind: moment[number] for kind, moment in zip(kinds, moments, strict=True)}}
            for number in range(len(groups))
        }
        inner = {"state": state, "param_groups": settings}
        if stage < 3 and rank == num_ranks - 1:  # without the padding, which moments have
            weights = [flat[: flat.numel() - _padding(g, num_ranks)] for flat, g in zip(weights, groups, strict=True)]
        own = (
            {"fp32_flat_groups": weights, "optimizer_state_dict": inner}
            if stage == 3
            else {"single_partition_of_fp32_groups": weights, "base_optimizer_state": inner}
        )
        content = {"optimizer_state_dict": {**own, "loss_scaler": scaler}}
        torch.save(content, folder / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        described = {
            "module": {name: torch.empty(0) if stage == 3 else p.detach() for p, name in names.items()}
            | {name: buffer for name, buffer in module.named_buffers() if name in module.state_dict()},
            "param_shapes": [OrderedDict((names[p], p.shape) for p in group) for group in groups],
            "frozen_param_shapes": OrderedDict((name, p.shape) for name, p in frozen.items()) or None,
            "frozen_param_fragments": {
                name: _parts([p], 3, num_ranks)[rank] if stage == 3 else p for name, p in frozen.items()
            },
            "shared_params": {},
            "dp_world_size": num_ranks,
            "mp_world_size": 1,
            "global_steps": 3,
            "global_samples": 12,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(described, folder / "global_step3" / f"{name}_model_states.pt")


def write_universal(folder: Path, stage: int, module: nn.Module, optimizer: Any) -> None:
    """Write what `ds_to_universal` makes of a checkpoint: in stage 3, tensors are flat, and counters are elsewhere."""
    write_deepspeed(folder, stage, 1, module, optimizer)
    (path,) = folder.glob("*/*optim_states.pt")
    common = torch.load(path, weights_only=False)["optimizer_state_dict"]
    inner = common["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    path.unlink()
    (path.parent / "zero").mkdir()
    kept = common if stage == 3 else {"loss_scaler": common["loss_scaler"]}
    torch.save({**kept, "param_groups": inner["param_groups"]}, path.parent / "zero/optimizer_state.pt")
    for name, param in module.named_parameters():
        for kind, value in {"fp32": param.detach(), **optimizer.state.get(param, {})}.items():
            file = path.parent / "zero" / name / f"{kind}.pt"
            file.parent.mkdir(exist_ok=True)
            if stage < 3:
                torch.save(value if kind == "step" else {"param": value, "cat_dim": 0}, file)
            elif kind != "step" and param.requires_grad:
                torch.save(value.flatten(), file)


def _padding(tensors: list[Tensor], num_ranks: int) -> int:
    return -sum(t.numel() for t in tensors) % (2 * num_ranks)


def _parts(tensors: list[Tensor], stage: int, num_ranks: int) -> list[Tensor]:
    """Return the flat part of each rank."""
    if stage == 3:
        each = [t.detach().flatten() for t in tensors]
        padded = [torch.cat([t, t.new_zeros(-t.numel() % num_ranks)]).chunk(num_ranks) for t in each]
        return [torch.cat(parts) for parts in zip(*padded, strict=True)]
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return list(torch.cat([flat, flat.new_zeros(_padding(tensors, num_ranks))]).chunk(num_ranks))
