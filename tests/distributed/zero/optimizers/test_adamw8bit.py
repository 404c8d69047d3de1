"""AdamW with moments in 8 bits or bf16 has the same bits under every sharding, and checkpoints keep them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from tests.distributed.zero.optimizers.test_muon import HOST, Case, build, sequences, start, train_steps
from tests.ranks import run_ranks
from tests.twins import all_params, assert_same_bits, params_of
from zero.checkpoint.checkpoint import load, save
from zero.core.partition.layout import ALIGNMENT
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.updates.adamw8bit import BLOCK, SCALE, SIGNED, AdamW8bit, dequantized
from zero.updates.adamw_bf16 import AdamWBf16
from zero.updates.compressed_adamw import CompressedAdamW

NUM_STEPS, SETTINGS = 3, {"lr": 1e-2, "weight_decay": 0.1}
ALIGNMENTS = {AdamW8bit: BLOCK, AdamWBf16: ALIGNMENT}


CASES = [
    Case(0, bucket_numel=700),
    Case(1, bucket_numel=700, shard_size=1),
    Case(2, bucket_numel=5000, shard_size=1, optimizer_over="all"),
    Case(3, bucket_numel=700, offload=HOST),
]


def start_compressed(case: Case, kind: type[CompressedAdamW] = AdamW8bit) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    case = replace(case, alignment=ALIGNMENTS[kind])
    return start(case, torch.float32, kind, all_params, clip_norm=None, **SETTINGS)


def train_whole(num_ranks: int, kind: type[CompressedAdamW]) -> dict[str, Tensor]:
    """Train in one process without ZeRO. The gradients of two ranks have the same sum in either order."""
    gpt = build(Axis.trivial("tensor")).float()
    optimizer = kind(gpt.parameters(), **SETTINGS)
    for step in range(NUM_STEPS):
        for ids in sequences(step).chunk(num_ranks):
            gpt(ids[:, :-1], ids[:, 1:]).backward()
        for param in gpt.parameters():
            param.grad.div_(num_ranks)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in gpt.named_parameters()}


def check_bits(folder: Path, kind: type[CompressedAdamW]) -> None:
    """Train under each sharding; each then continues, with the same bits, what the one before it has saved."""
    expected = train_whole(2, kind)
    for number, case in enumerate(CASES):
        model, optimizer = start_compressed(case, kind)
        train_steps(model, optimizer, 1, range(2))
        save(folder / str(number), model, optimizer)
        train_steps(model, optimizer, 1, range(2, NUM_STEPS))
        assert_same_bits(params_of(model), expected)
        if number:
            resumed, optimizer = start_compressed(case, kind)
            load(folder / str(number - 1), resumed, optimizer)
            train_steps(resumed, optimizer, 1, range(2, NUM_STEPS))
            assert_same_bits(params_of(resumed), expected)


@pytest.mark.parametrize("kind", ALIGNMENTS)
def test_every_sharding_has_the_bits_of_one_process(kind, tmp_path):
    run_ranks(2, check_bits, tmp_path, kind)


def moments_of(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[tuple[str, str], Tensor]:
    """Return the moments by (name of a parameter, name of the moment), with the parts of all tensor ranks."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    inner, tensor, dims = optimizer.inner, optimizer.tensor, split_dims(model.module)
    assert isinstance(inner, AdamW8bit)
    for flat in model.flats:
        for bucket in flat.buckets:
            spans = flat.layout.spans_in(bucket.ranges.own)
            for piece, (span, _) in zip(optimizer.pieces_of(bucket), spans, strict=True):
                state = inner.state[piece.param]
                for name, is_signed in SIGNED.items():
                    table = inner.table(is_signed, piece.param.device)[0]
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
    model, optimizer = start_compressed(saved)
    train_steps(model, optimizer, 1, range(2))
    save(folder, model, optimizer)
    before = moments_of(model, optimizer)
    model, optimizer = start_compressed(loaded)
    load(folder, model, optimizer)
    return before, moments_of(model, optimizer)


def test_another_tensor_size_quantizes_again(tmp_path):
    """The error is at most half the distance of two values of the table, of the largest moment of the parameter."""
    before, after = run_ranks(2, resize, tmp_path, Case(1, 1, 2, bucket_numel=700), CASES[0])[0]
    assert before.keys() == after.keys()
    for (name, moment), values in before.items():
        largest = values.abs().max()
        error = (values - after[name, moment]).abs().max()
        assert error <= largest * 0.9 / (128 if moment == "exp_avg" else 256) * 1.01, (name, moment)
    changed = [key for key, values in before.items() if not values.equal(after[key])]
    assert changed
    assert all(name in split_dims(build(Axis.trivial("tensor"))) for name, _ in changed)
