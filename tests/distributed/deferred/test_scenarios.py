"""Tests of what a run does beside its steps, under deferred execution: what they state holds there too."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import Mesh
from parallel.tensor.blocks import run_in_order
from tests.deferred import run_late
from tests.distributed.gpt import test_checkpoint_layouts as layouts
from tests.distributed.gpt import test_tensor_parallel as gpts
from tests.distributed.gpt import test_weights_out as weights_out
from tests.distributed.parallel import test_context_parallel as context
from tests.distributed.parallel import test_linear_cross_entropy as loss
from tests.distributed.parallel import test_tensor_layers as layers
from tests.distributed.zero import test_gathered as gathered
from tests.distributed.zero import test_several_optimizers as several
from tests.distributed.zero import test_sharded_init as sharded_init
from tests.distributed.zero import test_uneven as uneven
from tests.distributed.zero import test_zero_equals_one_process as plain
from tests.distributed.zero.optimizers import test_dion as dion
from tests.distributed.zero.optimizers import test_muon as muon
from tests.distributed.zero.scenarios import test_ranks
from tests.ranks import call_with, run_ranks
from tests.scenarios import TOLERANCE, Configuration, check, procedure_of
from tests.twins import assert_same_bits
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.memory.placement import OffloadConfig
from zero.partition.config import ZeroConfig


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that repeats a test, whose ranks run late this time."""

    def call(test: Callable[..., None], *args: object) -> None:
        monkeypatch.setattr(sys.modules[test.__module__], "run_ranks", run_late)
        test(*args)

    return call


def check_beside_steps() -> None:
    """Check what several small tests of two ranks check, and the turns of uneven data if nothing else communicates."""
    assert uneven.turns_of([3, 1]) == [[(0, 1.0), (1, 1.0), (2, 1.0)], [(0, 1.0), (0, 0.0), (0, 0.0)]][dist.get_rank()]
    for stage in (1, 3):
        gathered.check_changes_reach_ranks_and_optimizer(ZeroConfig(stage, bucket_numel=4000, overlap_gather=True))
    sharded_init.check_values(sharded_init.copied, ZeroConfig(3), 0, None)


def check_orders_that_change() -> None:
    """Check a model that skips blocks that were gathered ahead."""
    case = plain.case_of(name="albert", stage=3, bucket_numel=2000, prefetch_numel=10**9)
    expected = plain.train_in_one_process("albert", 2, 1, torch.float64)
    assert plain.train_with_zero(case).distance(expected) < plain.TOLERANCE[torch.float64]


def test_half_precision_on_the_host_gives_the_same_bits():
    """The parameters alone are in host memory: each update casts master weights for the copy."""
    offload = OffloadConfig("host", ("parameters",))
    case = plain.case_of(name="gpt", stage=3, bucket_numel=4000, dtype=torch.bfloat16, offload=offload)
    for found, expected in zip(*(run(2, plain.train_with_zero, case) for run in (run_late, run_ranks)), strict=True):
        assert_same_bits(found.params, expected.params)


def test_orders_that_change():
    run_late(2, check_orders_that_change)


def test_uneven_data_changed_parameters_several_optimizers_and_sharded_initialization():
    run_late(2, check_beside_steps)
    for test, configurations in (
        (test_ranks.test_ranks_run_out_of_batches_at_different_steps, [Configuration(1), Configuration(3)]),
        # Replicas set a mean aside, which the next one is added to; owners of parts add to their sum.
        (
            several.test_optimizers_of_disjoint_parameters_equal_one_process,
            [Configuration(stage, offloads=True) for stage in (0, 1)],
        ),
    ):
        find = partial(procedure_of, test.__module__)
        run_late(2, check, find, [test.__name__], configurations, TOLERANCE, torch.float64)


def check_backwards_that_end_early() -> None:
    """Check that a checkpoint that was fetched for a backward that ended early does no harm to later ones."""
    weights = [torch.full((3,), 1.0 + n, dtype=torch.float64, requires_grad=True) for n in range(5)]
    blocks = [lambda x, w=weight: (x * x.sigmoid() * w).cos() for weight in weights]
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    expected = torch.autograd.grad(run_in_order(blocks, x * 1).sum(), [x, *weights])
    two = Mesh.create(2).tensor
    stores = [("partition", two), ("partition_host", two), ("partition_host", two.without_peers())]
    for (store, replicas), defragment in itertools.product(stores, (True, False)):
        run = checkpointed_blocks(ActivationsConfig(store, 1, defragment), replicas)
        first = run(blocks, x * 1).sum()
        torch.autograd.grad(first, weights[-1])  # fetches the checkpoint before the last one, too
        second = run(blocks, x * 1).sum()
        torch.testing.assert_close(torch.autograd.grad(second, [x, *weights]), expected, rtol=0, atol=0)
        if not defragment:
            first, second = (run(blocks, x * 1).sum() for _ in range(2))
            torch.autograd.grad(first, weights[-1])
            torch.testing.assert_close(torch.autograd.grad(second, [x, *weights]), expected, rtol=0, atol=0)


def test_backwards_that_end_early():
    run_late(2, check_backwards_that_end_early)


def test_layers_and_the_loss(repeat):
    repeat(layers.test_layers_equal_the_whole_ones, "replicated", 2, None)
    repeat(layers.test_layers_equal_the_whole_ones, "split", 2, None)
    repeat(loss.test_the_loss_and_its_gradients_equal_those_of_whole_logits, 2)
    repeat(layers.test_more_ranks_than_a_parameter_has_stretches_share_it_too)


def test_exported_weights(repeat, tmp_path: Path):
    repeat(weights_out.test_transformers_computes_the_logits_of_the_run, tmp_path, weights_out.DEFAULT_CASES[1])


def test_a_run_that_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(layouts, "run_ranks", run_late)
    expected = layouts.run_ranks(1, layouts.train_and_save, layouts.REFERENCE, tmp_path / "reference", 2, 3)[0]
    for number, case in enumerate((layouts.LayoutCase(1, 2), layouts.LayoutCase(3, 2, offload=OffloadConfig("host")))):
        folder = tmp_path / str(number)
        layouts.run_ranks(2, layouts.train_and_save, case, folder, 2)
        found = layouts.run_ranks(2, layouts.load_and_train, case, folder / "step-00000002", 3)[0]
        assert found == pytest.approx(expected, abs=1e-10, rel=0)


def test_messages_of_matrices():
    on_host = OffloadConfig("host", states=("optimizer",))
    cases = [
        muon.Case(3, 2, offload=muon.HOST),
        muon.Case(1, 2, offload=on_host, num_micro_batches=3),
        muon.Case(2, 1, 2),
    ]
    found = run_late(2, call_with, muon.train, [[case] for case in cases])
    for case, *of_ranks in zip(cases, *found, strict=True):
        muon.assert_equals_whole(of_ranks, case)
    found = run_late(2, call_with, dion.train, [[case] for case in cases])
    for params in (params for of_rank in found for params in of_rank):
        torch.testing.assert_close(params, dion.train_whole(), rtol=0, atol=muon.TOLERANCE)


def test_exchanges_of_heads_and_gathers_of_logits_over_the_context(repeat):
    case = context.Case(1, 2, False, ZeroConfig(2, bucket_numel=2000), "keep")
    gpts.assert_equals_whole(run_late(2, context.train_case, case), gpts.train_whole(context.CONFIG, 1), tensor_size=1)
    repeat(context.test_every_context_rank_gets_the_logits_of_whole_sequences)
