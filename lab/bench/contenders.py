"""The contenders of step_time.py: one model, trained by our ZeRO stages, torch's data parallelism, or DeepSpeed.

Every contender averages gradients over all ranks and updates with AdamW, or with Muon if its name says so. They differ
in what AdamW updates: under bf16, our stages update fp32 master weights with fp32 moments, torch's contenders the bf16
weights with bf16 moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from gpt.model.transformer import GPT
from parallel.mesh import Mesh
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.core.units.unit import find_units
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.muon import Muon

LR, CLIP_NORM = 3e-4, 1.0


@dataclass(eq=False)
class Contender:
    """A model with its optimizer. `model(tokens, targets)` returns the mean loss."""

    model: nn.Module
    update: Callable[[], object]  # clips gradients, steps the optimizer, and clears gradients
    backward: Callable[[Tensor], object] = Tensor.backward
    memory_bytes: int = 0
    losses: list[Tensor] = field(default_factory=list)  # the mean loss of every step on this rank
    has_adamw: bool = True  # the losses are compared with those of the baseline

    def step(self, tokens: Tensor) -> None:
        """Train on int64 tokens of shape (micro_batch_size, seq_length + 1)."""
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        self.backward(loss)
        self.update()
        self.losses.append(loss.detach())


@dataclass(frozen=True)
class Terms:
    """The settings that all contenders share."""

    mesh: Mesh
    zero: ZeroConfig  # of our stages, but for the stage


def zero(model: nn.Module, terms: Terms, *, stage: int, offload: OffloadConfig = NO_OFFLOAD) -> Contender:
    engine = ZeroDataParallel(model, terms.mesh.data, replace(terms.zero, stage=stage), offload=offload)
    optimizer = ZeroOptimizer(engine, AdamW, clip_norm=CLIP_NORM, lr=LR, fused=True)
    return Contender(engine, optimizer.step)


def same_bits(model: nn.Module, terms: Terms, *, stage: int) -> Contender:
    """Build a stage as train.reproducible=layout does, with one block for each unit that adds micro-batches."""
    num_blocks = terms.mesh.data.size if stage < 2 else 1
    config = replace(terms.zero, sum_over_ranks="leaves", leaf_blocks=num_blocks)
    return zero(model, replace(terms, zero=config), stage=stage)


def recomputed(model: nn.Module, terms: Terms, *, stage: int) -> Contender:
    """Build a stage that keeps the inputs of the blocks of a GPT, and computes each block again."""
    assert isinstance(model, GPT), "--model=gpt has such blocks"
    config = ActivationsConfig("keep", defragment=False)
    run_blocks = checkpointed_blocks(config, terms.mesh.tensor, next(model.parameters()).device)
    assert run_blocks is not None
    model.run_blocks = run_blocks
    return zero(model, terms, stage=stage)


def muon(model: nn.Module, terms: Terms, *, stage: int, optimizer_type: type[Muon] = Muon) -> Contender:
    """Build a stage with Muon for the matrices of blocks, and AdamW for the rest."""
    engine = ZeroDataParallel(model, terms.mesh.data, replace(terms.zero, stage=stage))
    blocks = tuple(f"{unit}." for unit in find_units(model))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param_name, param in model.named_parameters():
        groups[param_name.startswith(blocks) and param.dim() == 2].append(param)
    optimizers = [optimizer_type(groups[True], lr=LR), CautiousAdamW(groups[False], lr=LR)]
    optimizer = ZeroOptimizer(engine, optimizers, tensor=terms.mesh.tensor, clip_norm=CLIP_NORM)
    return Contender(engine, optimizer.step, has_adamw=False)


class MuonWithoutIteration(Muon):
    """Muon as far as it is not the computation of whole matrices, each of which one rank gets and sends back."""

    def transform(self, matrices: Tensor, group: dict[str, Any], states: Sequence[dict[str, Tensor]]) -> None:
        """Leave the directions as they are."""


def ddp(
    model: nn.Module, terms: Terms, *, fused: bool | None = True, adamw: Callable[..., Optimizer] = AdamW
) -> Contender:
    engine = DistributedDataParallel(model, gradient_as_bucket_view=bool(fused))
    optimizer = adamw(engine.parameters(), lr=LR, fused=fused)
    return Contender(engine, torch_update(engine, optimizer))


def fsdp2(model: nn.Module, terms: Terms) -> Contender:
    """Build FSDP2, sharded by block as our stage 3 is."""
    for unit in reversed(find_units(model)):
        fully_shard(model.get_submodule(unit))
    optimizer = AdamW(model.parameters(), LR, fused=True)
    return Contender(model, torch_update(model, optimizer))


def deepspeed(model: nn.Module, terms: Terms, *, stage: int, offloads: bool = False) -> Contender:
    """Build DeepSpeed with its defaults and torch's AdamW, which it accepts on CPUs too."""
    from deepspeed import initialize  # optional: docs/results/step_time.md says how to install it

    optimizer = AdamW(model.parameters(), LR, fused=True)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # used for its counters only
        "gradient_clipping": CLIP_NORM,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
        "zero_optimization": {"stage": stage},
    }
    if offloads:
        places = ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer",)
        settings["zero_optimization"] |= {place: {"device": "cpu"} for place in places}
    engine, *_ = initialize(model=model, optimizer=optimizer, config=settings)
    return Contender(engine, engine.step, backward=engine.backward)


ON_HOST = OffloadConfig("host")
CONTENDERS: dict[str, Callable[[nn.Module, Terms], Contender]] = {
    "ddp-default": partial(ddp, fused=None),
    "ddp-fused": ddp,
    "ddp-zero-redundancy": partial(ddp, adamw=partial(ZeroRedundancyOptimizer, optimizer_class=AdamW)),
    "deepspeed-2-offload": partial(deepspeed, stage=2, offloads=True),
    "deepspeed-3": partial(deepspeed, stage=3),
    "deepspeed-3-offload": partial(deepspeed, stage=3, offloads=True),
    "fsdp2": fsdp2,
    "zero-0": partial(zero, stage=0),
    "zero-1": partial(zero, stage=1),
    "zero-1-layout": partial(same_bits, stage=1),
    "zero-1-muon": partial(muon, stage=1),
    "zero-1-muon-without-iteration": partial(muon, stage=1, optimizer_type=MuonWithoutIteration),
    "zero-1-recomputed": partial(recomputed, stage=1),
    "zero-2": partial(zero, stage=2),
    "zero-2-layout": partial(same_bits, stage=2),
    "zero-2-offload": partial(zero, stage=2, offload=ON_HOST),
    "zero-3": partial(zero, stage=3),
    "zero-3-layout": partial(same_bits, stage=3),
    "zero-3-offload": partial(zero, stage=3, offload=ON_HOST),
}


def torch_update(model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update
