"""Compare one training step of our ZeRO stages with torch's data parallelism: time, traffic, memory, loss.

Every process holds all contenders, each with its own copy of one model. In a round (lab/bench/rounds.py) each of them
runs a few steps. Run it with scripts/bench/step_time.sh.
"""

import argparse
import copy
import ctypes
import gc
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.model.transformer import GPT, initialize
from gpt.settings.tree import field_texts
from gpt.shape.config import ModelConfig
from lab.bench.contenders import CONTENDERS, Contender, Terms
from lab.bench.rounds import bytes_sent, in_rounds, quartiles, ratios, timed
from lab.bench.save_time import process_memory
from parallel.config_files import parse_yaml
from parallel.errors import exit_on_config_error
from parallel.fields import Range, alternatives, convert, field_types, is_text
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from parallel.world import World, start_world, stop_world
from zero.partition.config import ZeroConfig
from zero.units.unit import find_units

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_COMPARED_LOSSES = 16  # after that AdamW amplifies rounding errors without bound
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}  # under bf16 only ours have master weights: their loss falls faster
BASELINES = {"ddp-default", "ddp-fused"}
NAMED = "deepspeed", "offload", "muon", "layout", "planned", "recomputed"
OPTIONAL = {name for name in CONTENDERS if any(part in name for part in NAMED)}
NUM_BATCHES = 8
# Options of glibc's mallopt, and the largest threshold that glibc itself chooses, as for a program that frees
# megabytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 2**25


@dataclass(frozen=True)
class Settings:
    """The settings of one comparison."""

    model: Literal["transformers", "gpt"] = "transformers"
    """transformers: GPT2LMHeadModel; gpt: this project's own."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of parameters, gradients and activations."""
    contenders: list[str] = field(default_factory=lambda: [name for name in CONTENDERS if name not in OPTIONAL])
    """Contenders to compare. The baseline is the faster one of ddp-default and ddp-fused, or the first contender if
    neither is named. Offloads, Muon, layouts, plans, recomputation, and the stages of DeepSpeed (which
    must be installed) run only if they are named."""
    rounds: Annotated[int, Range(2)] = 40
    """Measured rounds; quartiles need two."""
    steps: int = 2
    """Steps of each contender in a round."""
    warmup: int = 3
    """Steps of each contender before the first round, after the two that allocate."""
    bucket_numel: int | None = 2**25
    """zero.bucket_numel of our stages."""
    defragment: bool | None = None
    """zero.defragment of our stages 2 and 3. With false, the default of stage 3, gradients are freed after the update,
    as by fsdp2."""
    overlap_gather: bool = False
    """zero.overlap_gather of our stages 0 to 2."""
    compile: Literal["none", "blocks"] = "none"
    """blocks: torch.compile of every transformer block, for all contenders alike, before the model is wrapped."""
    budget_gb: Annotated[float, Range(above=0)] = 1e6
    """activations.budget_gb of zero-1-planned; by default it keeps everything."""
    micro_batch_size: int = 4
    """Sequences of a rank in a step."""
    layers: int = 8
    """Transformer blocks."""
    hidden: int = 384
    """Width of the model; a head has a width of 64."""
    vocab: int = 8192
    """Rows of the token embedding."""
    seq: int = 256
    """Tokens a sequence."""
    json: str | None = None
    """File for all measured numbers."""


class LossOfLogits(nn.Module):
    """A model of transformers with the interface of ours: (tokens, targets) -> mean loss."""

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.language_model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Block:
    """The measurement of a few steps of one contender in one round."""

    seconds_per_step: float
    cpu_seconds_per_step: float  # of all threads of this rank; other work on the machine hardly changes it
    wire_bytes_per_step: float  # sent over loopback, per rank; NaN if ranks use another network


@dataclass(frozen=True)
class Row:
    """The line of one contender in the result. Quartiles and extremes are those of the rounds."""

    name: str
    is_baseline: bool
    milliseconds: float
    ratios: list[float]  # to the time of the baseline, one number a round
    cpu_ratios: list[float]  # the same of processor time
    wire_x_parameters: float
    memory_mib: float
    loss_difference: float | None  # None: of another optimizer


def build_model(settings: Settings, device: torch.device) -> nn.Module:
    """Build the model without dropout, with the same values on every rank and in every run."""
    heads = settings.hidden // 64
    torch.manual_seed(0)
    model: nn.Module
    if settings.model == "gpt":
        config = ModelConfig(settings.layers, settings.hidden, heads, settings.seq, settings.vocab, dropout=0.0)
        model = GPT(config, ReplicatedTokens(Axis.trivial("tensor")))
        initialize(model, seed=0)
    else:
        import transformers  # takes long

        sizes = {"n_layer": settings.layers, "n_embd": settings.hidden, "n_head": heads, "vocab_size": settings.vocab}
        without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": None}
        config = transformers.GPT2Config(n_positions=settings.seq, eos_token_id=None, **sizes, **without)
        model = LossOfLogits(transformers.GPT2LMHeadModel(config))
    return model.to(device, DTYPES[settings.precision])


def make_batches(settings: Settings, world: World) -> Tensor:
    """Return NUM_BATCHES batches of random tokens, low ids more often, different on every rank."""
    generator = torch.Generator().manual_seed(1 + world.rank)
    shape = NUM_BATCHES, settings.micro_batch_size, settings.seq + 1
    return (settings.vocab * torch.rand(shape, generator=generator) ** 8).long().to(world.device)


def build_contenders(settings: Settings, world: World, mesh: Mesh, batches: Tensor) -> list[Contender]:
    """Build and warm up the contenders one after the other. The memory of each is its peak above the memory in use."""
    config = ZeroConfig(
        bucket_numel=settings.bucket_numel,
        defragment=settings.defragment,
        overlap_gather=settings.overlap_gather,
    )
    terms = Terms(mesh, config, settings.budget_gb)
    # Before the first allocation: memory that malloc has once put on its heap is rarely returned to the system.
    return_freed_memory(at_least_bytes=2**16)
    template = build_model(settings, world.device)
    # Allocates workspaces that are never freed, and must count for no contender.
    template(batches[0, :, :-1], batches[0, :, 1:]).backward()
    template.zero_grad()
    contenders = []
    for name in settings.contenders:
        return_freed_memory(at_least_bytes=2**16)
        before = reset_peak_memory(world.device)
        model = copy.deepcopy(template)
        if settings.compile == "blocks":
            compile_blocks(model)
        contender = CONTENDERS[name](name, model, terms)
        train_steps(contender, batches, 2)
        reset_peak_memory(world.device)  # the peak of building is not that of a step
        train_steps(contender, batches, settings.warmup)
        contender.memory_bytes = peak_memory_bytes(world.device) - before
        return_freed_memory(at_least_bytes=LARGEST_MMAP_THRESHOLD)
        contenders.append(contender)
    return contenders


def compile_blocks(model: nn.Module) -> None:
    """Compile every block by itself, as torchtitan does."""
    # Blocks of all contenders share one code object, which dynamo compiles at most this often.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    for unit in find_units(model):
        if unit:
            model.get_submodule(unit).compile()


def train_steps(contender: Contender, batches: Tensor, num_steps: int) -> None:
    for _ in range(num_steps):
        contender.step(batches[len(contender.losses) % len(batches)])


def measure_block(contender: Contender, batches: Tensor, num_steps: int, world: World) -> Block:
    """Measure the time of the slowest rank, from an idle device to an idle device."""
    dist.barrier()
    sent = bytes_sent("lo")
    seconds, cpu_seconds = timed(lambda: train_steps(contender, batches, num_steps), world.device)
    sent = bytes_sent("lo") - sent
    is_wire = world.device.type == "cpu" and world.size == world.local_size
    return Block(
        seconds / num_steps,
        cpu_seconds / num_steps,
        sent / num_steps / world.size if is_wire else math.nan,
    )


def return_freed_memory(at_least_bytes: int) -> None:
    """Make malloc return freed memory to the system at once, which costs time.

    Otherwise the resident memory of a process says little about the memory that it uses.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, at_least_bytes)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * at_least_bytes)


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak that `peak_memory_bytes` returns to the memory in use, and return that."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return peak_memory_bytes(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of allocated memory (on a CPU: of resident memory) since the last reset_peak_memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_memory("VmHWM")


def compare(contenders: list[Contender], settings: Settings, world: World, batches: Tensor) -> list[Row]:
    """Measure all rounds and return one row a contender. Ratios are to the faster DDP, round by round."""
    measured = {one.name: partial(measure_block, one, batches, settings.steps, world) for one in contenders}
    blocks = in_rounds(measured, settings.rounds)
    seconds = {name: [block.seconds_per_step for block in blocks[name]] for name in blocks}
    cpu_seconds = {name: [block.cpu_seconds_per_step for block in blocks[name]] for name in blocks}
    candidates = BASELINES & seconds.keys() or {contenders[0].name}
    baseline = min(candidates, key=lambda name: statistics.median(seconds[name]))
    losses = {contender.name: mean_over_ranks(contender.losses) for contender in contenders}
    parameters = contenders[0].model.parameters()
    parameter_bytes = sum(param.numel() * param.element_size() for param in parameters)
    return [
        Row(
            contender.name,
            contender.name == baseline,
            1000 * statistics.median(seconds[contender.name]),
            ratios(seconds[contender.name], seconds[baseline]),
            ratios(cpu_seconds[contender.name], cpu_seconds[baseline]),
            statistics.median(block.wire_bytes_per_step for block in blocks[contender.name]) / parameter_bytes,
            contender.memory_bytes / 2**20,
            (losses[contender.name] - losses[baseline]).abs().max().item() if contender.has_adamw else None,
        )
        for contender in contenders
    ]


def mean_over_ranks(losses: list[Tensor]) -> Tensor:
    """Return the mean loss of each of the first steps, on the host."""
    means = torch.stack(losses[:NUM_COMPARED_LOSSES]).float()
    dist.all_reduce(means)
    return means.cpu() / dist.get_world_size()


def table(rows: list[Row]) -> str:
    head = f"{'':29}{'ms':>9}  {'x baseline':>10}  {'quartiles':>14}  {'min, max':>14}  "
    lines = [head + f"{'cpu':>5} {'wire':>5} {'MiB':>6}  loss"]
    for row in rows:
        low, median, high = quartiles(row.ratios)
        cpu = statistics.median(row.cpu_ratios)
        loss = "-" if row.loss_difference is None else f"{row.loss_difference:.1e}"
        lines.append(
            f"{row.name + ' (baseline)' * row.is_baseline:29}{row.milliseconds:9.1f}  "
            f"{median:10.3f}  {low:6.3f}, {high:6.3f}  "
            f"{min(row.ratios):6.3f}, {max(row.ratios):6.3f}  "
            f"{cpu:5.3f} {row.wire_x_parameters:5.2f} {row.memory_mib:6.0f}  {loss}"
        )
    return "\n".join(lines)


def parse_options() -> Settings:
    """Return the settings that the command line gives. Raise SystemExit if one does not suit its field."""
    parser = argparse.ArgumentParser(description=Settings.__doc__)
    for name, text in field_texts(Settings).items():
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text)
    with exit_on_config_error():
        return Settings(**{name: _value(name, text) for name, text in vars(parser.parse_args()).items()})


def _value(name: str, text: str) -> Any:
    hint = field_types(Settings)[name]
    return convert(name, hint, text if any(map(is_text, alternatives(hint))) else parse_yaml(text, name))


def main() -> None:
    settings = parse_options()
    world = start_world()
    if world.size == 1:  # DDP needs a process group even then
        dist.init_process_group(
            "nccl" if world.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    batches = make_batches(settings, world)
    contenders = build_contenders(settings, world, Mesh.create(1, world.device.type), batches)
    rows = compare(contenders, settings, world, batches)
    if world.is_first:
        report(rows, settings, world)
    stop_world()
    tolerance = LOSS_TOLERANCE[settings.precision]
    differences = (row.loss_difference for row in rows if row.loss_difference is not None)
    if not all(difference <= tolerance for difference in differences):  # NaN is a difference too
        raise SystemExit(f"losses differ by more than {tolerance}")


def report(rows: list[Row], settings: Settings, world: World) -> None:
    print(f"{world.size} ranks on {world.device.type}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(table(rows))
    if settings.json:
        result = {"settings": {**asdict(settings), "json": None}, "rows": [asdict(row) for row in rows]}
        Path(settings.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
