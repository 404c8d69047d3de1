"""Runs of other programs go on here: FSDP2's and DeepSpeed's, of models of transformers and of this project's GPT."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.layout import Progress
from gpt.pretrained.configuration import config_to_transformers, family_of
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from tests.distributed.gpt.test_checkpoint_layouts import CONFIG, GLOBAL_BATCH, LayoutCase, build, logical, save, train
from tests.oracle.deepspeed_files import write_deepspeed
from tests.pretrained_weights import weights_from_transformers
from tests.ranks import run_ranks
from tests.unit.gpt.checkpoint.runs import tiny_state, train_step
from tests.unit.gpt.model.models import preset_config
from zero import DistributedState

KINDS = ("master", "exp_avg", "exp_avg_sq")
NAMES = ("gpt2", "llama", "llama2", "qwen3")
LAYOUTS = [LayoutCase(2, data=2, tensor=2), LayoutCase(3, data=2, bucket_numel=None), LayoutCase(0)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, rank: int, size: int) -> list[float]:
    """Train as `train` does; return this rank's losses."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(CONFIG.vocab_size, (GLOBAL_BATCH, CONFIG.seq_length + 1), generator=generator)
        own = ids.chunk(size)[rank]
        model.zero_grad()  # before FSDP2's forward: between it and backward, its root has other parameters
        logits = model(input_ids=own[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_of_transformers(config: ModelConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    theirs = config_to_transformers(config)
    model = getattr(transformers, family_of(config).architecture)._from_config(theirs, dtype=torch.float64)
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    if torch.distributed.is_initialized():
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) is many]} for many in (True, False)]
    return model, torch.optim.AdamW([groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}], lr=1e-2)


def save_by_fsdp(config: ModelConfig, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train and save by FSDP2; return the losses of the next steps, and what was saved, whole, by our names."""
    data = Mesh.create(1).data
    model, optimizer = run_of_transformers(config)
    steps(model, optimizer, range(3), data.rank, data.size)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": moments}}, checkpoint_id=folder)
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = {"master": weights} | {
        kind: {name: state[kind] for name, state in moments["state"].items()} for kind in KINDS[1:]
    }
    whole = {
        f"{kind} of {name}": tensor
        for kind, tensors in saved.items()
        for name, tensor in weights_from_transformers(tensors, config).items()
    }
    return steps(model, optimizer, range(3, 8), data.rank, data.size), whole


def go_on(case: LayoutCase, folder: Path, saved: Path) -> list[float]:
    state = build(case)
    progress = load(folder, state, samples_before=lambda step: step * GLOBAL_BATCH)
    assert progress == Progress(3, 3 * GLOBAL_BATCH)
    save(state, saved, 3)
    return train(state, 3, 5)


def assert_goes_on(
    config: ModelConfig, layouts: list[LayoutCase], folder: Path, losses: list[float], whole: dict[str, Tensor]
) -> None:
    for number, case in enumerate(layouts):
        case = replace(case, model=config)
        for found in run_ranks(case.num_ranks, go_on, case, folder, folder.with_name(f"here-{number}")):
            assert found == pytest.approx(losses, rel=1e-6)  # transformers computes some norms in fp32
        loaded = logical(folder.with_name(f"here-{number}") / "step-00000003")
        for name, tensor in whole.items():
            assert loaded[name][: len(tensor)].equal(tensor), name
            assert len(tensor) == len(loaded[name]) or "embedding" in name or "head" in name


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_fsdp2_goes_on_with_the_same_moments(tmp_path: Path, name: str):
    """GPT-2's goes on in all layouts, which take turns for the others."""
    config, number = preset_config(name), NAMES.index(name)
    layouts = [LAYOUTS[number % len(LAYOUTS)]] if number else LAYOUTS
    found = run_ranks(2, save_by_fsdp, config, tmp_path / "fsdp2")
    losses = [sum(of_ranks) / 2 for of_ranks in zip(*(losses for losses, _ in found), strict=True)]
    assert_goes_on(config, layouts, tmp_path / "fsdp2", losses, found[0][1])


@pytest.mark.parametrize(
    ("name", "stage", "size", "layouts"), [("gpt2", 2, 3, LAYOUTS[:2]), ("llama", 3, 2, LAYOUTS[2:])]
)
def test_a_run_of_deepspeed_goes_on_with_the_same_moments(
    tmp_path: Path, name: str, stage: int, size: int, layouts: list[LayoutCase]
):
    config = preset_config(name)
    model, optimizer = run_of_transformers(config)
    steps(model, optimizer, range(3), 0, 1)
    write_deepspeed(tmp_path / "deepspeed", stage, size, model, optimizer)
    names = {param: name for name, param in model.named_parameters()}
    whole = {
        f"{kind} of {ours}": tensor
        for kind in KINDS[1:]
        for ours, tensor in weights_from_transformers(
            {name: optimizer.state[param][kind].clone() for param, name in names.items()}, config
        ).items()
    }
    assert_goes_on(config, layouts, tmp_path / "deepspeed", steps(model, optimizer, range(3, 8), 0, 1), whole)


def errors_of_resuming_from_what_each_rank_finds(folder: Path) -> list[str]:
    errors = []
    with contextlib.chdir(folder / str(torch.distributed.get_rank())):
        for name in ("dcp", "deepspeed"):
            with pytest.raises(ConfigError) as raised:
                load(Path(name), tiny_state())
            errors.append(str(raised.value))
    return errors


def test_ranks_that_find_different_checkpoints_of_the_same_step_at_one_path_load_none(tmp_path: Path):
    for rank in range(2):
        state = tiny_state(seed=rank)
        for step in range(2):
            train_step(state, step)
        content = DistributedState(state.model, state.optimizer).state_dict()
        dcp.save({"app": content}, checkpoint_id=tmp_path / str(rank) / "dcp", no_dist=True)
        module = state.model.unwrap()
        adamw = torch.optim.AdamW(module.parameters())
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        adamw.step()
        write_deepspeed(tmp_path / str(rank) / "deepspeed", 2, 1, module, adamw)
    found = run_ranks(2, errors_of_resuming_from_what_each_rank_finds, tmp_path)
    assert found[0] == found[1]
    assert all(error.startswith("the ranks find different checkpoints in ") for error in found[0]), found
