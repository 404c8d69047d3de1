"""8-bit AdamW has the same bits under every sharding, and checkpoints keep them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt.model.transformer import GPT, ModelConfig, initialize
from parallel.mesh import Axis, Mesh
from parallel.tensor.layers import split_dims
from parallel.tensor.token_layout import ReplicatedTokens
from tests.ranks import run_ranks
from tests.twins import assert_same_bits, params_of
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.optimizers.adamw8bit import BLOCK, MOMENTS, SCALE, AdamW8bit, dequantized
from zero.partition.config import ZeroConfig
from zero.state.checkpoint import load, save

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_length=8, vocab_size=97, dropout=0.0)
NUM_STEPS, SETTINGS = 4, {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    stage: int
    bucket_numel: int | None = 700
    shard_size: int | None = None
    tensor_size: int = 1
    offload: OffloadConfig = NO_OFFLOAD


CASES = [
    Case(0),
    Case(1, shard_size=1),
    Case(2, bucket_numel=5000),
    Case(3, offload=OffloadConfig(mode="host")),
]


def build(tensor: Axis) -> GPT:
    gpt = GPT(CONFIG, ReplicatedTokens(tensor))
    initialize(gpt, seed=3)
    return gpt


def start(case: Case) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    torch.set_default_dtype(torch.float32)
    mesh = Mesh.create(case.tensor_size, shard_size=case.shard_size)
    config = ZeroConfig(case.stage, case.bucket_numel, alignment=BLOCK)
    model = ZeroDataParallel(build(mesh.tensor), mesh.data, config, offload=case.offload)
    return model, ZeroOptimizer(model, AdamW8bit, tensor=mesh.tensor, **SETTINGS)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(CONFIG.vocab_size, (2, CONFIG.seq_length + 1), generator=generator)
    return model(ids[:, :-1], ids[:, 1:])


def train(model: ZeroDataParallel, optimizer: ZeroOptimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, step, model.data.rank).backward()
        optimizer.step()


def train_whole(num_ranks: int) -> dict[str, Tensor]:
    """Train in one process without ZeRO. The gradients of two ranks have the same sum in either order."""
    torch.set_default_dtype(torch.float32)
    gpt = build(Axis.trivial("tensor"))
    optimizer = AdamW8bit(gpt.parameters(), **SETTINGS)
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            loss_of(gpt, step, rank).backward()
        for param in gpt.parameters():
            param.grad.div_(num_ranks)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in gpt.named_parameters()}


def check_bits(folder: Path) -> None:
    """Train under each sharding; each then continues, with the same bits, what the one before it has saved."""
    expected = train_whole(2)
    for number, case in enumerate(CASES):
        model, optimizer = start(case)
        train(model, optimizer, range(2))
        save(folder / str(number), model, optimizer)
        train(model, optimizer, range(2, NUM_STEPS))
        assert_same_bits(params_of(model), expected)
        if number:
            resumed, optimizer = start(case)
            load(folder / str(number - 1), resumed, optimizer)
            train(resumed, optimizer, range(2, NUM_STEPS))
            assert_same_bits(params_of(resumed), expected)


def test_every_sharding_has_the_bits_of_one_process(tmp_path):
    run_ranks(2, check_bits, tmp_path)


def moments_of(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[tuple[str, str], Tensor]:
    """Return the moments by (name of a parameter, name of the moment), with the parts of all tensor ranks."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    inner, tensor, dims = optimizer.inner, optimizer.tensor, split_dims(model.module)
    assert isinstance(inner, AdamW8bit)
    for flat in model.flats:
        for bucket in flat.buckets:
            spans = flat.layout.spans_in(bucket.shard)
            for piece, (span, _) in zip(optimizer.pieces_of(bucket), spans, strict=True):
                state = inner.state[piece.param]
                for name, is_signed in MOMENTS.items():
                    table = inner._table(is_signed, piece.param.device)
                    values = dequantized(state[name], state[f"{name}_{SCALE}"], table)
                    found.setdefault((span.name, name), []).append(values)
    shapes = {name: param.shape for name, param in model.module.named_parameters()}
    whole = {}
    for key, pieces in found.items():
        own = torch.cat(pieces).view(shapes[key[0]])
        parts = own.new_empty(tensor.size, *own.shape)
        tensor.all_gather(own, out=parts).wait()
        whole[key] = torch.cat(list(parts), dims[key[0]]) if key[0] in dims else parts[0]
    return whole


def resize(folder: Path, saved: Case, loaded: Case) -> tuple[dict, dict]:
    """Return the moments that a layout has saved, and those that another one, with other tensor ranks, has loaded."""
    model, optimizer = start(saved)
    train(model, optimizer, range(3))
    save(folder, model, optimizer)
    before = moments_of(model, optimizer)
    model, optimizer = start(loaded)
    load(folder, model, optimizer)
    return before, moments_of(model, optimizer)


def test_another_tensor_size_quantizes_again(tmp_path):
    """The error is at most half the distance of two values of the table, of the largest moment of the parameter."""
    before, after = run_ranks(2, resize, tmp_path, Case(1, tensor_size=2), Case(0))[0]
    assert before.keys() == after.keys()
    for (name, moment), values in before.items():
        largest = values.abs().max()
        error = (values - after[name, moment]).abs().max()
        assert error <= largest * 0.9 / (128 if moment == "exp_avg" else 256) * 1.01, (name, moment)
    changed = [key for key, values in before.items() if not values.equal(after[key])]
    assert changed
    assert all(name in split_dims(build(Axis.trivial("tensor"))) for name, _ in changed)
