"""Muon under every stage, along the tensor axis too, trains as in one process with whole parameters."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from lab.observe.memory_tracker import MemoryTracker
from parallel.mesh import Axis, Mesh
from parallel.tensor.split_parameters import split_dims
from parallel.tensor.token_layout import ReplicatedTokens
from tests.pairwise import pairwise, product_of
from tests.ranks import run_cases, run_ranks
from tests.twins import Groups, all_params
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.checkpoint import resident
from zero.core.partition.layout import ALIGNMENT
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.muon import POLAR_EXPRESS, SAFETY, Muon

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=8, vocab_size=97, dropout=0.0)
LLAMA = replace(CONFIG, num_kv_heads=2, mlp="swiglu", mlp_width=48, norm="rms", positions="rope", biases=False)
CPU = torch.device("cpu")
GLOBAL_BATCH, NUM_STEPS = 24, 2  # sequences, divided over micro-batches and ranks
LR, DECAY, CLIP_NORM, BETAS = 1e-2, 0.1, 0.5, (0.9, 0.95)
MOMENTUM, COEFFICIENTS, EPS = 0.95, (3.4445, -4.7750, 2.0315), 1e-7
# float64: 5 steps of an iteration of which each multiplies an error of 1e-16 by at most 3.4, and 3 updates.
TOLERANCE = 1e-10
HOST = OffloadConfig(mode="host")
ROW_BETA = 0.9
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "polar express per head": {"iteration": "polar_express", "per_repetition": True},
    "normuon": {"row_beta": ROW_BETA, "nesterov": False},
    "polar express on gram matrices per head": {
        "iteration": "polar_express",
        "iterates_on": "gram",
        "per_repetition": True,
    },
    "cautious normuon per head": {"row_beta": ROW_BETA, "cautious_decay": True, "per_repetition": True},
}
# Gemini with chunks of some parameters and room for a part of the states.
AUTO = OffloadConfig("auto", accelerator_memory_gb=1.35e-3, hidden_dim=32, min_chunk_size_m=0.004, search_range_m=0.004)


@dataclass(frozen=True)
class Case:
    stage: int = 2
    data_size: int = 2
    tensor_size: int = 1
    num_micro_batches: int = 1
    bucket_numel: int | None = 4000
    shard_size: int | None = None
    optimizer_over: str = "group"
    offload: OffloadConfig = NO_OFFLOAD
    overlap_gather: bool = False
    model: ModelConfig = CONFIG
    alignment: int = ALIGNMENT
    store: str = "none"
    variant: str = "muon"

    @property
    def num_ranks(self) -> int:
        return self.data_size * self.tensor_size

    @property
    def num_steps(self) -> int:
        return 3 if self.offload.mode == "auto" else NUM_STEPS  # Gemini places buckets anew in the third


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return name.startswith("blocks.") and param.dim() == 2


def build(tensor: Axis, config: ModelConfig = CONFIG, store: str = "none") -> GPT:
    torch.set_default_dtype(torch.float64)
    gpt = GPT(config, ReplicatedTokens(tensor), checkpointed_blocks(ActivationsConfig(store), tensor))
    initialize(gpt, seed=3)
    return gpt


def groups_of(gpt: GPT, per_repetition: bool = False) -> list[dict[str, Any]]:
    matrices = [(name, param) for name, param in gpt.named_parameters() if is_matrix(name, param)]
    return [
        {"params": [param for name, param in matrices if ".qkv." not in name]},
        {"params": [param for name, param in matrices if ".qkv." in name]}
        | ({"per_repetition": True} if per_repetition else {}),
    ]


def sequences(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocab_size, (GLOBAL_BATCH, CONFIG.seq_length + 1), generator=generator)


def build_model(case: Case, param_dtype: torch.dtype = torch.float64) -> tuple[ZeroDataParallel, Mesh]:
    mesh = Mesh.create(case.tensor_size, shard_size=case.shard_size)
    gpt = build(mesh.tensor, case.model, case.store).to(param_dtype)
    types = {"accumulate_dtype": "bf16", "reduce_dtype": "bf16"} if param_dtype is torch.bfloat16 else {}
    ways = {"overlap_gather": case.overlap_gather, "alignment": case.alignment, "optimizer_over": case.optimizer_over}
    config = ZeroConfig(case.stage, case.bucket_numel, **ways, **types)
    return ZeroDataParallel(gpt, mesh.data, config, offload=case.offload), mesh


def start(
    case: Case,
    param_dtype: torch.dtype = torch.float64,
    kind: type[torch.optim.Optimizer] = Muon,
    groups: Groups = groups_of,
    clip_norm: float | None = CLIP_NORM,
    **settings: Any,
) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    model, mesh = build_model(case, param_dtype)
    gpt = model.module
    settings = {"lr": LR, "weight_decay": DECAY} | settings
    optimizers = [kind(groups(gpt), **settings)]
    if groups is not all_params:
        rest = [param for name, param in gpt.named_parameters() if not is_matrix(name, param)]
        of_adamw = {name: settings[name] for name in settings.keys() & {"lr", "weight_decay", "eps", "cautious_decay"}}
        optimizers.append(CautiousAdamW(rest, **of_adamw))
    return model, ZeroOptimizer(model, optimizers, tensor=mesh.tensor, clip_norm=clip_norm)


def start_variant(case: Case) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    settings = dict(VARIANTS[case.variant])
    groups = partial(groups_of, per_repetition=settings.pop("per_repetition", False))
    return start(case, groups=groups, ns_dtype="fp64", **settings)


def train_steps(model: ZeroDataParallel, optimizer: ZeroOptimizer, num_micro_batches: int, steps: range) -> None:
    for step in steps:
        own = sequences(step).chunk(model.data.size)[model.data.rank].chunk(num_micro_batches)
        with model.accumulate():
            for ids in own[:-1]:
                (model(ids[:, :-1], ids[:, 1:]) / num_micro_batches).backward()
        (model(own[-1][:, :-1], own[-1][:, 1:]) / num_micro_batches).backward()
        optimizer.step()


def whole_params(model: ZeroDataParallel, tensor: Axis) -> dict[str, Tensor]:
    """Return the parameters with the parts of all tensor ranks; replicated ones must agree to the bit."""
    dims, whole = split_dims(model.module), {}
    with model.gathered() as module, torch.no_grad():
        for name, param in module.named_parameters():
            parts = param.new_empty(tensor.size, *param.shape)
            tensor.all_gather(param.detach().contiguous(), out=parts).wait()
            assert name in dims or all(part.equal(parts[0]) for part in parts), name
            whole[name] = torch.cat(list(parts), dims[name]) if name in dims else parts[0]
    return whole


def train(case: Case) -> dict[str, Tensor]:
    with MemoryTracker(CPU) if case.offload.mode == "auto" else nullcontext():  # Gemini measures memory
        model, optimizer = start_variant(case)
        train_steps(model, optimizer, case.num_micro_batches, range(case.num_steps))
        if case.offload.mode == "auto":
            are_apart = {bucket.home.is_apart for bucket in model.buckets}
            assert are_apart == {True, False}
        return whole_params(model, optimizer.tensor)


def orthogonalized(matrix: Tensor, iteration: str) -> Tensor:
    """Return the iteration of the Muon paper, or of the first steps of Polar Express, in fp64."""
    is_polar = iteration == "polar_express"
    x = matrix / matrix.norm().clamp(min=EPS) / (SAFETY if is_polar else 1)
    for a, b, c in POLAR_EXPRESS[:5] if is_polar else [COEFFICIENTS] * 5:
        x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
    return x


def matrices_in(name: str, param: Tensor, per_head: bool = False) -> list[Tensor]:
    """Return views of the matrices of a whole parameter: q, k and v are three, or of each head; gate and up are two."""
    rows = {"qkv.weight": (3, CONFIG.head_size), "qkv.kv_weight": (2, CONFIG.head_size)}
    rows |= {"up.weight": (2, 1)} if len(param) == 2 * 48 else {}
    if per_head and "qkv" in name:
        return list(param.view(-1, CONFIG.head_size, param.shape[1]))
    for end, (count, height) in rows.items():
        if name.endswith(end):
            return list(param.view(-1, count, height, param.shape[1]).unbind(1))
    return [param]


class PlainMuon:
    """Muon and its variants, of a whole parameter, by the formulas of their papers."""

    def __init__(self, name: str, param: Tensor, settings: dict[str, Any]):
        self.name, self.param, self.settings = name, param, settings
        self.momentum, self.second = torch.zeros_like(param), {}

    def update(self, grad: Tensor) -> None:
        settings, per_head = self.settings, self.settings.get("per_repetition", False)
        self.momentum.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
        has_nesterov = settings.get("nesterov", True)
        direction = (1 - MOMENTUM) * grad + MOMENTUM * self.momentum if has_nesterov else self.momentum
        views = (matrices_in(self.name, whole, per_head) for whole in (self.param, direction))
        for number, (own, values) in enumerate(zip(*views, strict=True)):
            matrix = values.reshape(-1, values.shape[-1])
            update = orthogonalized(matrix, settings.get("iteration", "newton_schulz"))
            rate = LR * 0.2 * max(matrix.shape) ** 0.5
            if "row_beta" in settings:  # NorMuon, algorithm 1
                before = self.second.get(number, torch.zeros(len(matrix)))
                self.second[number] = ROW_BETA * before + (1 - ROW_BETA) * update.square().mean(1)
                update = update / (self.second[number].sqrt() + 1e-8)[:, None]
                rate = LR * 0.2 * matrix.numel() ** 0.5 / update.norm()
            step = rate * update.view(own.shape)
            decays = (step * own >= 0) if settings.get("cautious_decay") else torch.ones_like(own)
            own.sub_(step + LR * DECAY * decays * own)


@cache
def train_whole(config: ModelConfig = CONFIG, variant: str = "muon", num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    """Train in one process without ZeRO: Muon as the papers have it, and AdamW."""
    plain: dict[str, PlainMuon] = {}
    settings = VARIANTS[variant]

    def update(name: str, param: Tensor, grad: Tensor) -> None:
        plain.setdefault(name, PlainMuon(name, param, settings)).update(grad)

    adam_type = PlainCautiousAdamW if settings.get("cautious_decay") else torch.optim.AdamW
    return train_plain(update, num_steps, config, adam_type)


class PlainCautiousAdamW(torch.optim.AdamW):
    """Cautious weight decay by its formula: theta - lr (u + decay [u theta >= 0] theta)."""

    def step(self) -> None:
        (group,) = self.param_groups
        before = [param.detach().clone() for param in group["params"]]
        group["weight_decay"] = 0.0
        super().step()
        with torch.no_grad():
            for param, old in zip(group["params"], before, strict=True):
                param.sub_(LR * DECAY * ((old - param) * old >= 0) * old)


def plain_updates(kind: Callable[[torch.Size], Any]) -> Callable[[str, Tensor, Tensor], None]:
    """Return an update for `train_plain`: each matrix has an object of this kind, which makes it of gradients."""
    of_matrices: dict[tuple[str, int], Any] = {}

    def update(name: str, param: Tensor, grad: Tensor) -> None:
        param.mul_(1 - LR * DECAY)
        for number, (own, values) in enumerate(zip(matrices_in(name, param), matrices_in(name, grad), strict=True)):
            matrix = values.reshape(-1, values.shape[-1])
            plain = of_matrices.setdefault((name, number), kind(matrix.shape))
            own.sub_(LR * plain.update(matrix).view(own.shape))

    return update


def train_plain(
    update: Callable[[str, Tensor, Tensor], object] | None,
    num_steps: int,
    config: ModelConfig = CONFIG,
    adam_type: type[torch.optim.AdamW] = torch.optim.AdamW,
    **adam_settings: Any,
) -> dict[str, Tensor]:
    """Train in one process without ZeRO: `update(name, param, grad)` for matrices, if given, and AdamW for the rest."""
    gpt = build(Axis.trivial("tensor"), config)
    matrices = {name: param for name, param in gpt.named_parameters() if update and is_matrix(name, param)}
    rest = [param for name, param in gpt.named_parameters() if name not in matrices]
    adam = adam_type(rest, lr=LR, weight_decay=DECAY, betas=BETAS, **adam_settings)
    for step in range(num_steps):
        ids = sequences(step)
        gpt.zero_grad()
        gpt(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), CLIP_NORM)
        adam.step()
        with torch.no_grad():
            for name, param in matrices.items():
                update(name, param, param.grad)
    return {name: param.detach() for name, param in gpt.named_parameters()}


def assert_equals_whole(found: list[dict[str, Tensor]], case: Case) -> None:
    expected = train_whole(case.model, case.variant, case.num_steps)
    for params in found:
        torch.testing.assert_close(params, expected, rtol=0, atol=TOLERANCE)


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "ranks": [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)],  # data x tensor
    "num_micro_batches": [1, 2],
    "bucket_numel": [900, 5000, None],
    "placed": [NO_OFFLOAD, HOST],
    "variant": list(VARIANTS),
}


def case_of(ranks: tuple[int, int], placed: OffloadConfig, **settings: Any) -> Case:
    offload = placed
    if placed is HOST and settings["stage"] < 3:
        offload = OffloadConfig(mode="host", states=("optimizer",))
    return Case(data_size=ranks[0], tensor_size=ranks[1], offload=offload, **settings)


def check_cases(cases: list[Case]) -> None:
    for num_ranks in {case.num_ranks for case in cases}:
        chosen = [[case] for case in cases if case.num_ranks == num_ranks]
        for (case,), found in zip(chosen, run_cases(num_ranks, train, chosen), strict=True):
            assert_equals_whole(found, case)


def test_muon_equals_one_process():
    """The variants, which are the arithmetic of whole matrices, take turns with the pairs of the other settings."""
    few = FACTORS | {"ranks": [(2, 1), (1, 2)], "bucket_numel": [900, 5000]}
    variants = itertools.cycle(few.pop("variant"))
    cases = [case_of(variant=next(variants), **combination) for combination in pairwise(**few)]
    mixed = Case(3, 2, 2, 2, 300), Case(1, 2, overlap_gather=True)
    check_cases([*cases, *mixed, Case(2, 2, 1, 2, offload=AUTO), Case(3, 2, 1, 2, offload=AUTO)])


def test_grouped_heads_and_gates_are_matrices_of_their_own():
    """Rows of gate and up take turns one by one; over four ranks, two share each head of keys and values."""
    per_head = Case(1, 1, 4, model=LLAMA, variant="cautious normuon per head")
    check_cases([Case(2, 2, model=LLAMA), Case(3, 2, 2, model=LLAMA), Case(1, 1, 4, model=LLAMA), per_head])


@pytest.mark.full
@pytest.mark.parametrize("stage", FACTORS["stage"])
@pytest.mark.parametrize("ranks", FACTORS["ranks"], ids=str)
def test_muon_equals_one_process_in_every_combination(ranks, stage):
    most = {"variant": ["muon", "cautious normuon per head"]}
    product = product_of(FACTORS | most | {"ranks": [ranks], "stage": [stage]}, *FACTORS)
    check_cases([case_of(**combination) for combination in product])


def test_parts_of_tensor_ranks_by_themselves_are_other_matrices():
    found = run_ranks(2, train_apart)
    assert all(sent == {"shard": 0, "tensor": 0} for _, sent in found)
    difference = max((params - train_whole()[name]).abs().max() for name, params in found[0][0].items())
    assert difference > 1e-3


def train_apart() -> tuple[dict[str, Tensor], dict[str, int]]:
    model, optimizer = start(Case(data_size=1, tensor_size=2), joins_parts=False, ns_dtype="fp64")
    optimizer.tensor.log.clear()
    train_steps(model, optimizer, 1, range(NUM_STEPS))
    return whole_params(model, optimizer.tensor), sent_by_axis(model)


def sent_by_axis(model: ZeroDataParallel) -> dict[str, int]:
    """Return the bytes of matrices that this rank has sent along each axis."""
    sent = {"shard": 0, "tensor": 0}
    for (axis, op, _), num_bytes in model.data.log.wire_bytes_by.items():
        if op == "all_to_all":
            sent["tensor" if axis == "tensor" else "shard"] += num_bytes
    return sent


def measure(case: Case) -> dict[str, Any]:
    """Train in bf16 with gradients in bf16, and return what is sent and allocated."""
    model, optimizer = start(case, torch.bfloat16, ns_dtype="bf16")
    train_steps(model, optimizer, 1, range(1))
    model.data.log.clear()
    train_steps(model, optimizer, 1, range(1, 2))
    matrices = optimizer.updates[0]
    return {
        "sent": sent_by_axis(model),
        "numel": sum(matrix.numel for matrix in matrices.matrices),
        "flops": matrices.assignment.all_flops,
        "planned": matrices.sent_numels()[model.shard_axis.rank],
        "states": resident.resident_states(model, optimizer),
        "num_parameters": sum(param.numel() for param in model.module.parameters()),
        "state_bytes": optimizer.state_bytes_per_element,
    }


def test_traffic_and_memory_are_those_of_the_formulas():
    """Matrices cost 2 Psi (N-1)/N^2 elements in the mean over ranks, and along the tensor axis 2 Psi (T-1)/(N T).

    Buckets are so small that each matrix is spread over all ranks. Moments are 4 bytes of a matrix, 8 of the rest.
    """
    model = replace(CONFIG, num_layers=1)
    cases = [Case(1, 4, bucket_numel=256, model=model), Case(2, 2, 2, bucket_numel=128, model=model), Case(0, 4)]
    for case, found in zip(cases, run_cases(4, measure, [[case] for case in cases]), strict=True):
        num_shards = 1 if case.stage == 0 else case.data_size
        numel, itemsize = found[0]["numel"], torch.bfloat16.itemsize
        mean = {axis: sum(rank["sent"][axis] for rank in found) / len(found) for axis in ("shard", "tensor")}
        assert mean["shard"] == pytest.approx(2 * itemsize * numel * (num_shards - 1) / num_shards**2, rel=0.02)
        num_parts = case.tensor_size
        assert mean["tensor"] == pytest.approx(2 * itemsize * numel / num_shards * (num_parts - 1) / num_parts)
        for rank in found:
            assert rank["sent"]["shard"] == itemsize * rank["planned"]
            share = numel / rank["num_parameters"]
            assert rank["state_bytes"] == pytest.approx(4 * share + 8 * (1 - share))
            moments = rank["state_bytes"] * rank["num_parameters"] / num_shards
            assert rank["states"].moments == pytest.approx(moments, rel=0.02)
