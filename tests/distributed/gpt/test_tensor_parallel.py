"""A GPT split along the tensor axis, with ZeRO along the data axis, trains as it does whole in one process."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from gpt.builder.train_state import build_model
from gpt.model.transformer import GPT, Sequences, initialize
from gpt.pretrained.families import config_to_transformers
from gpt.pretrained.tensors import load_weights
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis, Mesh
from parallel.tensor.layers import shared_dims, split_dims
from parallel.tensor.token_layout import NO_CONTEXT, ReplicatedTokens, SplitTokens, TokenLayout
from tests.pairwise import pairwise
from tests.pretrained_weights import weights_from_transformers
from tests.ranks import run_ranks
from tests.twins import params_of
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.engine import ZeroDataParallel
from zero.formulas import memory
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.partition.config import ZeroConfig
from zero.partition.stage import STAGES
from zero.state import resident
from zero.step.loss_scale import LossScale

NUM_STEPS, CLIP_NORM, TOLERANCE = 3, 0.5, 1e-10
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
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, tensor=mesh.tensor, clip_norm=CLIP_NORM, lr=1e-2, weight_decay=0.1, fused=True
    )
    torch.manual_seed(17 + mesh.data.rank)  # dropout
    losses, norms = zip(*train_steps(config, mesh, model, optimizer, num_micro_batches), strict=True)
    return Result(list(losses), list(norms), params_of(model), split_dims(gpt))


def train_steps(
    config: ModelConfig, mesh: Mesh, model: ZeroDataParallel, optimizer: ZeroOptimizer, num_micro_batches: int
) -> Iterator[tuple[float, float]]:
    """Yield the loss and the norm of each step."""
    for step in range(NUM_STEPS):
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
def train_whole(config: ModelConfig, data_size: int, num_micro_batches: int = 1) -> Result:
    model = build(config, ReplicatedTokens(Axis.trivial("tensor")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(NUM_STEPS):
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
    "sizes": [(1, 2), (2, 2), (1, 4), (4, 1), (2, 1)],  # data x tensor
    "stage": [0, 1, 2, 3],
    "is_split": [False, True],
    "num_micro_batches": [1, 3],
    "store": ["none", "keep"],
    "vocab_size": [97, 300],
}


def check_layout(
    sizes: tuple[int, int], stage: int, is_split: bool, num_micro_batches: int, store: str, vocab_size: int
) -> None:
    data_size, tensor_size = sizes
    config, zero, activations = config_of(vocab_size), ZeroConfig(stage, 2000), ActivationsConfig(store, 2)
    arguments = (config, tensor_size, is_split, zero, num_micro_batches, activations)
    results = run_ranks(data_size * tensor_size, train, *arguments)
    assert_equals_whole(results, train_whole(config, data_size, num_micro_batches), tensor_size)


@pytest.mark.parametrize("combination", pairwise(**FACTORS), ids=lambda c: "-".join(map(str, c.values())))
def test_tensor_and_data_parallel_equal_one_process(combination):
    check_layout(**combination)


@pytest.mark.full
@pytest.mark.parametrize("values", list(itertools.product(*FACTORS.values())), ids=lambda v: "-".join(map(str, v)))
def test_all_layouts_equal_one_process(values):
    check_layout(**dict(zip(FACTORS, values, strict=True)))


@pytest.mark.parametrize("is_split", [False, True])
def test_the_vocabulary_of_gpt2_is_split_too(is_split):
    config = config_of(50257)
    results = run_ranks(4, train, config, 4, is_split, ZeroConfig(1))
    assert_equals_whole(results, train_whole(config, 1), 4)


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


@pytest.mark.parametrize(("is_split", "stage"), [(False, 3), (True, 1)])
def test_dropout_is_deterministic_and_replayed_by_recomputation(is_split, stage):
    config = config_of(97, dropout=0.2)
    plain, again, recomputed = (
        run_ranks(4, train, config, 2, is_split, ZeroConfig(stage, 2000), 1, ActivationsConfig(store))
        for store in ("none", "none", "keep")
    )
    assert_same_bits(again, plain)
    assert_same_bits(recomputed, plain)
    assert plain[0].losses != train_whole(config_of(97), 2).losses


@pytest.mark.parametrize(("tensor_size", "is_split"), [(1, False), (2, False), (2, True), (4, True)])
def test_weights_of_transformers_give_its_logits_at_any_tensor_size(tensor_size, is_split):
    import transformers

    config = config_of(97)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config_to_transformers(config)).double().eval()
    for param in theirs.parameters():
        torch.nn.init.normal_(param, 0, 0.3)
    ids = torch.randint(97, (3, 7))  # 21 tokens, which two or four ranks cannot divide equally
    weights = weights_from_transformers(theirs.state_dict(), config)
    for logits in run_ranks(tensor_size, logits_of, config, is_split, weights, ids):
        torch.testing.assert_close(logits, theirs(ids).logits.detach(), rtol=1e-10, atol=1e-10)


def logits_of(config: ModelConfig, is_split: bool, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    model = GPT(config, layout_of(Mesh.create(torch.distributed.get_world_size()).tensor, is_split)).eval()
    load_weights(model, weights)
    return model(ids).detach()


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


@pytest.mark.parametrize("tensor_size", [2, 4])
def test_a_block_sends_two_all_reduces_forward_and_two_backward(tensor_size):
    blocks = 3
    plain, _ = run_ranks(tensor_size, traffic_of_a_step, tensor_size, False, ActivationsConfig("none"), True)[0]
    # In forward the embedding sums its words, and the head, which computes its gradients there, that of its input.
    assert plain == {("all_reduce", "forward"): 2 * blocks + 2, ("all_reduce", "backward"): 2 * blocks}


@pytest.mark.parametrize(("stops_early", "num_recomputed"), [(True, 1), (False, 2)])
def test_full_recomputation_sends_what_section_8_says(stops_early, num_recomputed):
    """Six all-reduces of batch x sequence x hidden per block count 12; five count 10 if it stops early."""
    blocks = 3
    found, _ = run_ranks(2, traffic_of_a_step, 2, False, ActivationsConfig("keep"), stops_early)[0]
    expected_backward = (2 + num_recomputed) * blocks
    assert found == {("all_reduce", "forward"): 2 * blocks + 2, ("all_reduce", "backward"): expected_backward}
    num_all_reduces_a_block = 4 + num_recomputed
    assert 2 * num_all_reduces_a_block == {True: 10, False: 12}[stops_early]


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


def states_of(tensor_size: int, stage: int) -> tuple[float, int, int]:
    mesh = Mesh.create(tensor_size)
    config = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, seq_length=16, vocab_size=512)
    torch.set_default_dtype(torch.bfloat16)
    gpt = GPT(config, ReplicatedTokens(mesh.tensor))
    initialize(gpt, seed=0)
    model = ZeroDataParallel(gpt, mesh.data, ZeroConfig(stage, defragment=True))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, tensor=mesh.tensor, fused=True)
    model(*batch(config, 0, 0, 0)).backward()
    optimizer.step()
    dims = split_dims(gpt)
    num_replicated = sum(param.numel() for name, param in gpt.named_parameters() if name not in dims)
    return resident.resident_states(model, optimizer).total, num_replicated, sum(p.numel() for p in gpt.parameters())


def states_of_stages(tensor_size: int) -> list[tuple[float, int, int]]:
    return [states_of(tensor_size, stage) for stage in (1, 2, 3)]


def test_model_states_fall_with_both_axes():
    (of_one_rank,) = run_ranks(1, states_of_stages, 1)
    _, num_replicated, whole_numel = of_one_rank[0]
    for data_size, tensor_size in ((2, 1), (1, 2), (2, 2), (1, 4)):
        expected_numel = (whole_numel - num_replicated) / tensor_size + num_replicated
        for of_rank in run_ranks(data_size * tensor_size, states_of_stages, tensor_size):
            for stage, (found, _, numel) in enumerate(of_rank, start=1):
                assert numel == expected_numel
                promised = memory.formula(STAGES[stage], expected_numel, data_size, gradient_bytes=4)
                assert found == pytest.approx(promised.total, rel=0.02)
    assert [found for found, *_ in of_one_rank] == pytest.approx([18 * whole_numel] * 3, rel=0.02)


def skip_after_overflows() -> list[tuple[int, bool, float]]:
    return [skip_after_overflow_on(rank) for rank in range(4)]


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
    assert run_ranks(4, skip_after_overflows) == [[(1, True, 512.0)] * 4] * 4
