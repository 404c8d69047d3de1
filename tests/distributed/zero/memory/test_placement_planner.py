"""Placement within a budget (Gemini): as much on the accelerator as it allows, never more, and the same training."""

import pytest
import torch

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from lab.observe.memory_tracker import MemoryTracker
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from tests.distributed.zero.memory.kept_apart import KeptApart
from tests.models import SEQ, VOCAB, batch, build, loss_of
from tests.ranks import run_ranks
from tests.twins import params_of
from zero.checkpoint.rank_state import RankState
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import OffloadConfig, ZeroConfig
from zero.sharded_init import ShardedInit

NUM_STEPS = 3  # the planner records two, and places anew in the third
NUM_PARAMETERS = {3: 159_000, 6: 313_000}  # about, by number of layers
LEAST_SHARE = {2: 0.55, 3: 0.5}  # of the peak without offload, for each stage; two units must fit
MEBI_OF_A_CHUNK = 10_000 / 2**20


def auto(budget_gb: float) -> OffloadConfig:
    return OffloadConfig(
        "auto",
        accelerator_memory_gb=budget_gb,
        hidden_dim=64,
        min_chunk_size_m=MEBI_OF_A_CHUNK,
        search_range_m=MEBI_OF_A_CHUNK,
    )


def train(
    config: ZeroConfig,
    offload: OffloadConfig,
    num_micro_batches: int,
    dtype: torch.dtype,
    num_layers: int = 6,
    shard_size: int | None = None,
) -> dict:
    mesh = Mesh.create(tensor_size=1, shard_size=shard_size)
    with MemoryTracker(torch.device("cpu")) as tracker:
        with ShardedInit(mesh.data, config.policy, 30_000, offload) as init:
            model_config = ModelConfig(num_layers, 64, 4, seq_length=SEQ, vocab_size=VOCAB, dropout=0.0)
            gpt = GPT(model_config, ReplicatedTokens(Axis.trivial("tensor"))).to(dtype)
            initialize(gpt, seed=0)
        model = ZeroDataParallel(gpt, mesh.data, config, init=init, offload=offload)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, clip_norm=0.5, fused=True)
        del gpt
        if config.stage < 3:
            tracker.restart()  # parameters that persist are allocated twice while the model is wrapped
        losses = []
        with KeptApart(tracker):
            for step in range(NUM_STEPS):
                with model.accumulate():
                    for micro_batch in range(num_micro_batches - 1):
                        loss_of(model, batch(step, micro_batch, mesh.data.rank)).backward()
                loss = loss_of(model, batch(step, num_micro_batches - 1, mesh.data.rank))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        peak_bytes = tracker.device.peak_total
        shards = sum(b.params.cached.nbytes for b in model.buckets if b.params.cached is not None)
    return {
        "losses": losses,
        "params": params_of(model),
        "peak_bytes": peak_bytes,
        "cached_bytes": shards,
        "placed": sum(not bucket.home.is_apart for bucket in optimizer.buckets),
        "buckets": len(optimizer.buckets),
        "prefetch": model.residency.prefetch_numel,
    }


@pytest.mark.parametrize(
    ("stage", "num_ranks", "num_micro_batches", "shard_size"),
    [(2, 1, 3, None), pytest.param(3, 2, 1, None, marks=pytest.mark.full), (3, 2, 1, 1)],
)
def test_a_budget_is_kept_and_filled_and_changes_nothing(stage, num_ranks, num_micro_batches, shard_size):
    """Budgets: the least that a step needs, and more than everything needs.

    With groups a rank owns a part of its shard, and the whole shard is in the cache.
    """
    config = ZeroConfig(stage, bucket_numel=10_000, optimizer_over="all" if shard_size else "group")
    others = num_micro_batches, torch.float64, 3, shard_size
    plain = run_ranks(num_ranks, train, config, OffloadConfig(), *others)
    found = {}
    for share in (LEAST_SHARE[stage], 3.0):
        budget_gb = share * plain[0]["peak_bytes"] / 1e9
        found[share] = run_ranks(num_ranks, train, config, auto(budget_gb), *others)
        for result, expected in zip(found[share], plain, strict=True):
            assert result["peak_bytes"] <= budget_gb * 1e9
            assert result["losses"] == pytest.approx(expected["losses"], abs=1e-10, rel=0)
            for name, param in expected["params"].items():
                torch.testing.assert_close(result["params"][name], param, atol=1e-10, rtol=0)
    little, everything = (of_ranks[0] for of_ranks in found.values())
    assert little["placed"] + little["cached_bytes"] < everything["placed"] + everything["cached_bytes"]
    assert little["placed"] < little["buckets"] == everything["placed"] == everything["buckets"]
    if stage == 3:
        all_that_could_be_fetched = pytest.approx(NUM_PARAMETERS[3], rel=0.02)
        assert everything["prefetch"] == all_that_could_be_fetched


def test_two_fifths_of_the_model_states_are_enough():
    """A budget of 40% of the bytes of bf16 model states holds all that a step needs, and is never exceeded."""
    budget_gb = 0.4 * 16 * NUM_PARAMETERS[6] / 1e9
    (result,) = run_ranks(1, train, ZeroConfig(3), auto(budget_gb), 2, torch.bfloat16)
    assert 0.8 * budget_gb < result["peak_bytes"] / 1e9 <= budget_gb


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_that_is_placed_anew_keeps_masters_and_moments_to_the_bit(stage):
    """Master weights have digits that the bf16 parameters beside them do not have."""
    model = build("gpt").bfloat16()
    engine = ZeroDataParallel(model, Axis.trivial("data"), ZeroConfig(stage, 1000), offload=OffloadConfig("host"))
    optimizer = ZeroOptimizer(engine, torch.optim.AdamW, lr=1e-2, fused=True)

    def step(number: int) -> None:
        loss_of(engine, batch(number, 0, 0)).backward()
        optimizer.step()

    step(0)
    before = {name: tensor.clone() for name, tensor in RankState(engine, optimizer).owned().items()}
    for home in (engine.homes.accelerator, engine.homes.optimizer):
        for bucket in optimizer.buckets:
            optimizer.place(bucket, home)
            assert bucket.home is home
        after = RankState(engine, optimizer).owned()
        assert before.keys() == after.keys()
        assert all(after[name].equal(tensor) for name, tensor in before.items())
    step(1)
    assert not all(RankState(engine, optimizer).owned()[name].equal(tensor) for name, tensor in before.items())
