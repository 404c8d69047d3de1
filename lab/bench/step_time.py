"""Compare one training step of our ZeRO stages with torch's data parallelism: time, traffic, memory, loss.

Every process holds all contenders, each with its own copy of one model. In a round (lab/bench/rounds.py) each of them
runs a few steps. Run it with scripts/bench/step_time.sh. The step of a deep and narrow model is the work of the host:

    scripts/bench/step_time.sh --model gpt --layers 24 --hidden 32 --seq 16 --micro_batch_size 1
"""

import argparse
import copy
import ctypes
import gc
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from lab.bench.contenders import CONTENDERS, Contender, Terms
from lab.bench.rounds import bytes_sent, in_rounds, process_memory, quartiles, ratios, timed
from lab.pages.markdown import table
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from parallel.world import World, start_world, stop_world
from zero.core.units.unit import find_units
from zero.settings.config import ZeroConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_COMPARED_LOSSES = 16  # after that AdamW amplifies rounding errors without bound
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}  # under bf16 only ours have master weights: their loss falls faster
BASELINES = {"ddp-default", "ddp-fused"}
NAMED = "deepspeed", "offload", "muon", "layout", "recomputed"
BY_DEFAULT = [name for name in CONTENDERS if not any(part in name for part in NAMED)]
NUM_BATCHES = 8
# Options of glibc's mallopt, and the largest threshold that glibc itself chooses, as for a program that frees
# megabytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 2**25


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=["transformers", "gpt"], default="transformers", help="GPT2LMHeadModel, or this project's")
    add("--precision", choices=[*DTYPES], default="fp32", help="type of parameters, gradients and activations")
    text = "a list; the baseline is the faster one of ddp-default and ddp-fused, or the first: " + ", ".join(CONTENDERS)
    add("--contenders", type=yaml.safe_load, default=BY_DEFAULT, help=text)
    add("--rounds", type=int, default=40, help="measured rounds; quartiles need two")
    add("--steps", type=int, default=2, help="steps of each contender in a round")
    add("--warmup", type=int, default=3, help="steps before the first round, after the two that allocate")
    add("--bucket_numel", type=yaml.safe_load, default=2**25, help="zero.bucket_numel of our stages")
    text = "zero.defragment of our stages 2 and 3; false frees gradients after the update, as fsdp2 does"
    add("--defragment", type=yaml.safe_load, help=text)
    add("--overlap_gather", type=yaml.safe_load, default=False, help="zero.overlap_gather of our stages 0 to 2")
    text = "blocks: torch.compile of every transformer block, for all contenders alike"
    add("--compile", choices=["none", "blocks"], default="none", help=text)
    add("--micro_batch_size", type=int, default=4, help="sequences of a rank in a step")
    add("--layers", type=int, default=8)
    add("--hidden", type=int, default=384, help="width of the model; heads have a width of 64, or less if it is less")
    add("--vocab", type=int, default=8192)
    add("--seq", type=int, default=256, help="tokens of a sequence")
    add("--json", type=Path, help="file for all measured numbers")
    options = parser.parse_args()
    if unknown := set(options.contenders) - CONTENDERS.keys():
        parser.error(f"--contenders: {', '.join(unknown)} is unknown; choose from {', '.join(CONTENDERS)}")
    if options.rounds < 2:
        parser.error(f"--rounds={options.rounds} has no quartiles; choose 2 or more")
    return options


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
    """The measurement of a few steps of one contender in one round, for each step."""

    seconds: float
    cpu_seconds: float  # of all threads of this rank; other work on the machine hardly changes it
    wire_bytes: float  # sent over loopback, per rank; NaN if ranks use another network


@dataclass(frozen=True)
class Row:
    """The line of one contender in the result. Lists have one number a round."""

    name: str
    is_baseline: bool
    milliseconds: float  # of a step, the median
    seconds: list[float]
    cpu_seconds: list[float]
    ratios: list[float]  # of seconds to those of the baseline
    cpu_ratios: list[float]  # the same of processor time
    wire_x_parameters: float
    memory_mib: float
    loss_difference: float | None  # None: of another optimizer


def build_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model without dropout, with the same values on every rank and in every run."""
    heads = max(1, options.hidden // 64)
    torch.manual_seed(0)
    model: nn.Module
    if options.model == "gpt":
        config = ModelConfig(options.layers, options.hidden, heads, options.seq, options.vocab, dropout=0.0)
        model = GPT(config, ReplicatedTokens(Axis.trivial("tensor")))
        initialize(model, seed=0)
    else:
        import transformers  # takes long

        sizes = {"n_layer": options.layers, "n_embd": options.hidden, "n_head": heads, "vocab_size": options.vocab}
        without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": None}
        config = transformers.GPT2Config(n_positions=options.seq, eos_token_id=None, **sizes, **without)
        model = LossOfLogits(transformers.GPT2LMHeadModel(config))
    return model.to(device, DTYPES[options.precision])


def make_batches(options: argparse.Namespace, world: World) -> Tensor:
    """Return NUM_BATCHES batches of random tokens, low ids more often, different on every rank."""
    generator = torch.Generator().manual_seed(1 + world.rank)
    shape = NUM_BATCHES, options.micro_batch_size, options.seq + 1
    return (options.vocab * torch.rand(shape, generator=generator) ** 8).long().to(world.device)


def build_contenders(options: argparse.Namespace, world: World, mesh: Mesh, batches: Tensor) -> dict[str, Contender]:
    """Build and warm up the contenders one after the other. The memory of each is its peak above the memory in use."""
    names = "bucket_numel", "defragment", "overlap_gather"
    config = ZeroConfig(**{name: getattr(options, name) for name in names})
    terms = Terms(mesh, config)
    # Before the first allocation: memory that malloc has once put on its heap is rarely returned to the system.
    return_freed_memory(at_least_bytes=2**16)
    template = build_model(options, world.device)
    # Allocates workspaces that are never freed, and must count for no contender.
    template(batches[0, :, :-1], batches[0, :, 1:]).backward()
    template.zero_grad()
    contenders = {}
    for name in dict.fromkeys(options.contenders):
        return_freed_memory(at_least_bytes=2**16)
        before = reset_peak_memory(world.device)
        model = copy.deepcopy(template)
        if options.compile == "blocks":
            compile_blocks(model)
        contender = CONTENDERS[name](model, terms)
        train_steps(contender, batches, 2)
        reset_peak_memory(world.device)  # the peak of building is not that of a step
        train_steps(contender, batches, options.warmup)
        contender.memory_bytes = peak_memory_bytes(world.device) - before
        return_freed_memory(at_least_bytes=LARGEST_MMAP_THRESHOLD)
        contenders[name] = contender
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
    is_wire = world.device.type == "cpu" and world.size == world.local_size
    sent_by_rank = (bytes_sent("lo") - sent) / world.size if is_wire else math.nan
    return Block(seconds / num_steps, cpu_seconds / num_steps, sent_by_rank / num_steps)


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


def compare(contenders: dict[str, Contender], options: argparse.Namespace, world: World, batches: Tensor) -> list[Row]:
    """Measure all rounds and return one row a contender. Ratios are to the faster DDP, round by round."""
    measured = {name: partial(measure_block, one, batches, options.steps, world) for name, one in contenders.items()}
    blocks = in_rounds(measured, options.rounds)
    seconds = {name: [block.seconds for block in found] for name, found in blocks.items()}
    cpu_seconds = {name: [block.cpu_seconds for block in found] for name, found in blocks.items()}
    candidates = BASELINES & seconds.keys() or {options.contenders[0]}
    baseline = min(candidates, key=lambda name: statistics.median(seconds[name]))
    losses = {name: mean_over_ranks(one.losses) for name, one in contenders.items()}
    parameter_bytes = sum(param.nbytes for param in next(iter(contenders.values())).model.parameters())
    return [
        Row(
            name,
            name == baseline,
            1000 * statistics.median(seconds[name]),
            seconds[name],
            cpu_seconds[name],
            ratios(seconds[name], seconds[baseline]),
            ratios(cpu_seconds[name], cpu_seconds[baseline]),
            statistics.median(block.wire_bytes for block in blocks[name]) / parameter_bytes,
            one.memory_bytes / 2**20,
            (losses[name] - losses[baseline]).abs().max().item() if one.has_adamw else None,
        )
        for name, one in contenders.items()
    ]


def mean_over_ranks(losses: list[Tensor]) -> Tensor:
    """Return the mean loss of each of the first steps, on the host."""
    means = torch.stack(losses[:NUM_COMPARED_LOSSES]).float()
    dist.all_reduce(means)
    return means.cpu() / dist.get_world_size()


def result_lines(rows: list[Row]) -> list[str]:
    """Return the table of the result in Markdown: medians with quartiles, of the rounds."""
    lines = []
    for row in rows:
        milliseconds = ([1000 * value for value in values] for values in (row.seconds, row.cpu_seconds))
        cells = [with_quartiles(values, ".1f") for values in milliseconds]
        cells += [with_quartiles(values, ".3f") for values in (row.ratios, row.cpu_ratios)]
        cells += [f"{row.wire_x_parameters:.2f}", f"{row.memory_mib:.0f}"]
        cells += ["-" if row.loss_difference is None else f"{row.loss_difference:.1e}"]
        lines.append([row.name + " (baseline)" * row.is_baseline, *cells])
    headings = "", "ms", "CPU ms", "x baseline", "CPU, x baseline", "wire, x parameters", "peak MiB", "loss"
    return table(headings, lines)


def with_quartiles(values: list[float], form: str) -> str:
    of_rounds = quartiles(values)
    return f"{of_rounds.median:{form}} ({of_rounds.low:{form}} to {of_rounds.high:{form}})"


def main() -> None:
    options = parse_options()
    world = start_world()
    if world.size == 1:  # DDP needs a process group even then
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    batches = make_batches(options, world)
    contenders = build_contenders(options, world, Mesh.create(1, world.device.type), batches)
    rows = compare(contenders, options, world, batches)
    if world.is_first:
        print(f"{world.size} ranks on {world.device.type}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
        print(*result_lines(rows), sep="\n")
        if options.json:
            result = {"settings": vars(options) | {"json": None}, "rows": [asdict(row) for row in rows]}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1))
    stop_world()
    tolerance = LOSS_TOLERANCE[options.precision]
    differences = (row.loss_difference for row in rows if row.loss_difference is not None)
    if not all(difference <= tolerance for difference in differences):  # NaN is a difference too
        raise SystemExit(f"losses differ by more than {tolerance}")


if __name__ == "__main__":
    main()
