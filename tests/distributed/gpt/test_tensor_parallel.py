"""A GPT split along the tensor axis, with ZeRO along the data axis, trains as it does whole in one process."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from gpt.builder.train_state import build_model, parameter_groups
from gpt.model.transformer import GPT, Sequences, initialize
from gpt.settings.optimizer import OptimizerSettings
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis, Mesh
from parallel.tensor.split_parameters import shared_dims, split_dims
from parallel.tensor.token_layout import NO_CONTEXT, ReplicatedTokens, SplitTokens, TokenLayout
from tests.pairwise import noting, pairwise
from tests.ranks import run_cases, run_ranks
from tests.twins import params_of
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.core.step.loss_scale import LossScale
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

NUM_STEPS, CLIP_NORM, TOLERANCE = 2, 0.5, 1e-10
ADAMW = OptimizerSettings(lr=1e-2, weight_decay=0.1)
BATCH, SEQ = 2, 12


@dataclass(frozen=True)
class Result:
    losses: list[float]
    grad_norms: list[float]
    params: dict[str, Tensor]  # of this tensor rank
    dims: dict[str, int]


def config_of(vocab_size: int, dropout: float = 0.0, num_layers: int = 2) -> ModelConfig:
    return ModelConfig(num_layers, 32, 4, SEQ, vocab_size, vocab_multiple=128, dropout=dropout)


def layout_of(axis: Axis, is_split: bool, context: Axis = NO_CONTEXT) -> TokenLayout:
    return (SplitTokens if is_split else ReplicatedTokens)(axis, context)


def build(config: ModelConfig, tokens: TokenLayout, activations: ActivationsConfig | None = None) -> GPT:
    torch.set_default_dtype(torch.float64)
    model = build_model(config, activations or ActivationsConfig(), tokens, torch.device("cpu"), torch.float64)
    initialize(model, seed=3)
    for name, param in model.named_parameters():  # values that differ between parameters and agree between ranks
        if name not in split_dims(model) | shared_dims(model) and param.dim() == 1:
            param.data += torch.linspace(-0.1, 0.1, param.numel())
    return model


def batch(config: ModelConfig, step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + data_rank)
    ids = torch.randint(config.vocab_size, (BATCH, SEQ + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def train(
    config: ModelConfig,
    tensor_size: int,
    is_split: bool,
    zero: ZeroConfig,
    num_micro_batches: int = 1,
    activations: ActivationsConfig | None = None,
    context_size: int = 1,
    offload: OffloadConfig = NO_OFFLOAD,
) -> Result:
    mesh = Mesh.create(tensor_size, context_size=context_size)
    gpt = build(config, layout_of(mesh.tensor, is_split, mesh.context), activations)
    model = ZeroDataParallel(gpt, mesh.data, zero, offload=offload)
    groups = parameter_groups(gpt, ADAMW)
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, groups, tensor=mesh.tensor, clip_norm=CLIP_NORM, lr=ADAMW.lr, fused=True
    )
    torch.manual_seed(17 + mesh.data.rank)  # dropout
    losses, norms = zip(*train_steps(config, mesh, model, optimizer, num_micro_batches), strict=True)
    return Result(list(losses), list(norms), params_of(model), split_dims(gpt))


def train_steps(
    config: ModelConfig,
    mesh: Mesh,
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer,
    num_micro_batches: int,
    num_steps: int = NUM_STEPS,
) -> Iterator[tuple[float, float]]:
    """Yield the loss and the norm of each step."""
    for step in range(num_steps):
        total = torch.zeros(())

        def backward(micro_batch: int, step: int = step, total: Tensor = total) -> None:
            loss = model(*batch(config, step, micro_batch, mesh.batch_rank)) / num_micro_batches
            loss.backward()
            total += loss.detach() / mesh.data.size

        with model.accumulate():
            for micro_batch in range(num_micro_batches - 1):
                backward(micro_batch)
        backward(num_micro_batches - 1)
        norm = optimizer.step().item()
        mesh.data.all_reduce(total, out=total).wait()
        yield total.item(), norm


@cache
def train_whole(config: ModelConfig, data_size: int, num_micro_batches: int = 1, num_steps: int = NUM_STEPS) -> Result:
    model = build(config, ReplicatedTokens(Axis.trivial("tensor")))
    optimizer = torch.optim.AdamW(parameter_groups(model, ADAMW), lr=ADAMW.lr)
    losses, norms = [], []
    for step in range(num_steps):
        total = 0.0
        for micro_batch, rank in itertools.product(range(num_micro_batches), range(data_size)):
            loss = model(*batch(config, step, micro_batch, rank)) / (num_micro_batches * data_size)
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, {name: param.detach() for name, param in model.named_parameters()}, {})


def whole_params(results: list[Result], tensor_size: int) -> dict[str, Tensor]:
    """Return the whole parameters of one data-parallel replica; replicated ones must agree to the bit."""
    replica = results[:tensor_size]
    whole = {}
    for name in replica[0].params:
        parts = [result.params[name] for result in replica]
        if name in replica[0].dims:
            whole[name] = torch.cat(parts, dim=replica[0].dims[name])
        else:
            assert all(part.equal(parts[0]) for part in parts), name
            whole[name] = parts[0]
    return whole


def assert_equals_whole(results: list[Result], expected: Result, tensor_size: int) -> None:
    for result in results:
        assert result.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
        assert result.grad_norms == pytest.approx(expected.grad_norms, abs=TOLERANCE, rel=0)
    for name, param in whole_params(results, tensor_size).items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=TOLERANCE)


def assert_same_bits(found: list[Result], expected: list[Result]) -> None:
    for result, other in zip(found, expected, strict=True):
        assert (result.losses, result.grad_norms) == (other.losses, other.grad_norms)
        assert all(result.params[name].equal(other.params[name]) for name in result.params)


FACTORS = {
    "sizes": [(1, 2), (2, 2), (1, 4)],  # data x tensor
    "stage": [0, 1, 2, 3],
    "is_split": [False, True],
    "num_micro_batches": [1, 3],
    "store": ["none", "keep"],
    "vocab_size": [97, 300],
    "overlap_gather": [False, True],
    "offload": [NO_OFFLOAD, OffloadConfig("host")],
}


def train_case(case: dict) -> Result:
    activations = ActivationsConfig(case["store"], 2)
    zero = ZeroConfig(case["stage"], 5000, overlap_gather=case["overlap_gather"])
    parallel = case["sizes"][1], case["is_split"], zero
    ways = {"activations": activations, "offload": case["offload"]}
    return train(config_of(case["vocab_size"]), *parallel, case["num_micro_batches"], **ways)


def check_layouts(cases: list[dict]) -> None:
    (num_ranks,) = {math.prod(case["sizes"]) for case in cases}
    for case, results in zip(cases, run_cases(num_ranks, train_case, [[case] for case in cases]), strict=True):
        data_size, tensor_size = case["sizes"]
        with noting(case):
            expected = train_whole(config_of(case["vocab_size"]), data_size, case["num_micro_batches"])
            assert_equals_whole(results, expected, tensor_size)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensor_and_data_parallel_equal_one_process(num_ranks):
    check_layouts([case for case in pairwise(**FACTORS) if math.prod(case["sizes"]) == num_ranks])


def test_dropout_differs_where_activations_are_split_and_agrees_where_they_are_not():
    for is_split in (False, True):
        for seen in run_ranks(2, observe_dropout, is_split):
            assert seen["attention differs"]
            assert seen["residual agrees"] == (not is_split)
            assert seen["next number agrees"]


def observe_dropout(is_split: bool) -> dict[str, bool]:
    axis = Mesh.create(2).tensor
    model = build(config_of(97, dropout=0.5), layout_of(axis, is_split))
    torch.manual_seed(5)
    block = model.blocks[0]
    attention_weights = []
    block.attention.kernel = lambda q, k, v, p, _documents: (
        attention_weights.append(torch.dropout(torch.ones(64), p, True)) or v
    )
    num_own_tokens = 24 // model.tokens.num_parts
    residual = block.dropout(torch.ones(num_own_tokens, 32))
    block.attention(torch.ones(num_own_tokens, 32), Sequences(2))

    def agrees(mine: Tensor) -> bool:
        of_all = mine.new_empty(2, *mine.shape)
        axis.all_gather(mine, out=of_all).wait()
        return of_all[0].equal(of_all[1])

    return {
        "attention differs": not agrees(attention_weights[0]),
        "residual agrees": agrees(residual),
        "next number agrees": agrees(torch.rand(8)),
    }


def traffic_of_a_step(
    tensor_size: int, is_split: bool, activations: ActivationsConfig, stops_early: bool, num_layers: int = 3
) -> tuple[Counter, int]:
    """Return the number of collectives of one forward and backward by (op, phase), and the bytes that they send.

    Each message has the size of the residual stream, tokens x hidden. Smaller ones, of the loss and of small
    parameters, are left out.
    """
    mesh = Mesh.create(tensor_size)
    mesh.log.keeps_events = True
    config = ModelConfig(num_layers, hidden_size=32, num_heads=4, seq_length=64, vocab_size=97, dropout=0.0)
    model = build(config, layout_of(mesh.tensor, is_split), activations)
    ids = torch.randint(97, (2, 65), generator=torch.Generator().manual_seed(0))
    with set_checkpoint_early_stop(stops_early):
        with mesh.log.during("forward"):
            loss = model(ids[:, :-1], ids[:, 1:])
        with mesh.log.during("backward"):
            loss.backward()
    stream_bytes = 2 * 64 * 32 * 8
    large = [event for event in mesh.log.events if event.message_bytes >= stream_bytes]
    assert all(event.message_bytes == stream_bytes for event in large)
    return Counter((event.op, event.phase) for event in large), sum(event.wire_bytes for event in large)


@pytest.mark.parametrize(
    ("tensor_size", "store", "stops_early", "num_recomputed"),
    [(2, "none", True, 0), (4, "none", True, 0), (2, "keep", True, 1), (2, "keep", False, 2)],
)
def test_a_block_sends_two_all_reduces_forward_two_backward_and_those_that_it_recomputes(
    tensor_size, store, stops_early, num_recomputed
):
    """Six all-reduces of batch x sequence x hidden count 12 (paper, section 8); five count 10 if it stops early."""
    blocks = 3
    found, _ = run_ranks(tensor_size, traffic_of_a_step, tensor_size, False, ActivationsConfig(store), stops_early)[0]
    # In forward the embedding sums its words, and the head, which computes its gradients there, that of its input.
    in_forward, in_backward = 2 * blocks + 2, (2 + num_recomputed) * blocks
    assert found == {("all_reduce", "forward"): in_forward, ("all_reduce", "backward"): in_backward}


def test_sequence_parallelism_sends_as_much_and_one_input_gather_a_column_layer():
    """An all-reduce is a reduce-scatter and an all-gather, which send half of its bytes each.

    The head, which computes its gradients in forward, gathers its input once.
    """
    blocks = 3
    found, _ = run_ranks(2, traffic_of_a_step, 2, True, ActivationsConfig("none"), True)[0]
    crossings = 2 * blocks + 1  # of the blocks, and of the embedding or the head
    assert found == {
        ("reduce_scatter", "forward"): crossings + 1,  # the second term: the gradient of the head's input
        ("all_gather", "forward"): crossings,
        ("reduce_scatter", "backward"): crossings - 1,
        ("all_gather", "backward"): crossings + 2 * blocks,  # the second term: the inputs of qkv and up
    }


def skip_after_overflow_on(overflowing_rank: int) -> tuple[int, bool, float]:
    """Return (skipped steps, whether nothing has changed, the loss scale) after an overflow on one rank only."""
    mesh = Mesh.create(tensor_size=2)
    torch.set_default_dtype(torch.float16)
    gpt = GPT(config_of(97), ReplicatedTokens(mesh.tensor))
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage=2))
    scale = LossScale(2.0**10, is_dynamic=True, hysteresis=1)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, loss_scale=scale, fused=True)
    if torch.distributed.get_rank() == overflowing_rank:
        gpt.blocks[0].mlp.up.weight.register_hook(lambda grad: grad * torch.inf)
    before = [param.detach().clone() for param in gpt.parameters()]
    (model(*batch(config_of(97), 0, 0, mesh.data.rank)) * scale.scale).backward()
    optimizer.step()
    is_unchanged = all(param.equal(old) for param, old in zip(gpt.parameters(), before, strict=True))
    return int(optimizer.num_skipped), is_unchanged, scale.scale.item()


def test_an_overflow_on_one_rank_skips_the_step_on_both_axes():
    assert run_cases(4, skip_after_overflow_on, [[rank] for rank in range(4)]) == [[(1, True, 512.0)] * 4] * 4
