"""Scenarios beside the steps of a GPT would not race on a GPU, by the checker of streams on ranks of gloo."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from parallel.tensor.blocks import run_in_order
from parallel.tensor.layers import Split, column_gradients, column_products, row_gradients, row_products
from parallel.tensor.products import OWN_PRECISION
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens
from tests.checked_streams import run_checked
from tests.distributed.gpt import test_checkpoint_layouts as layouts
from tests.distributed.gpt import test_weights_out as weights_out
from tests.distributed.parallel import test_context_parallel as context
from tests.distributed.parallel import test_tensor_layers as layers
from tests.distributed.zero import test_distributed_state as distributed_state
from tests.distributed.zero import test_gathered as gathered
from tests.distributed.zero import test_optimizer_lists as lists
from tests.distributed.zero import test_sharded_init as sharded_init
from tests.distributed.zero import test_zero_equals_one_process as plain
from tests.distributed.zero.optimizers import test_muon as muon
from tests.distributed.zero.scenarios import test_ranks
from tests.ranks import call_with
from tests.scenarios import Configuration, check
from tests.twins import check_all, configs
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks
from zero.settings.config import OffloadConfig, ZeroConfig

HOST = OffloadConfig("host")
OPTIMIZER = OffloadConfig("host", ("optimizer",))


def end_backwards_early() -> None:
    """Check that a checkpoint that was fetched for a backward that ended early does no harm to later ones."""
    weights = [torch.full((3,), 1.0 + n, dtype=torch.float64, requires_grad=True) for n in range(5)]
    blocks = [lambda x, w=weight: (x * x.sigmoid() * w).cos() for weight in weights]
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    expected = torch.autograd.grad(run_in_order(blocks, x * 1).sum(), [x, *weights])
    two = Mesh.create(2).tensor
    chosen = [("partition", two), ("partition_host", two), ("partition_host", two.without_peers())]
    for (store, replicas), defragment in itertools.product(chosen, (True, False)):
        run = checkpointed_blocks(ActivationsConfig(store, 1, defragment), replicas)
        first = run(blocks, x * 1).sum()
        torch.autograd.grad(first, weights[-1])  # fetches the checkpoint before the last one, too
        second = run(blocks, x * 1).sum()
        torch.testing.assert_close(torch.autograd.grad(second, [x, *weights]), expected, rtol=0, atol=0)
        if not defragment:
            first, second = (run(blocks, x * 1).sum() for _ in range(2))
            torch.autograd.grad(first, weights[-1])
            torch.testing.assert_close(torch.autograd.grad(second, [x, *weights]), expected, rtol=0, atol=0)


def run_operations_of_graphs() -> None:
    """Run what a compiled block calls in the place of its layers: nothing observes it inside a graph."""
    axis = Mesh.create(2).tensor
    for layout in (ReplicatedTokens, SplitTokens):
        split = Split(layout(axis), OWN_PRECISION)
        x, weight, bias = torch.ones(2 * split.tokens.num_parts, 4), torch.ones(4, 4), torch.ones(4)
        own = x[:2]
        (y,) = row_products(x, [weight], [bias], split)
        row_gradients([y], x, [weight], split, (True, True, True))
        (y,) = column_products(own, [weight], [bias], split)
        column_gradients([y], own, [weight], split)


def run_case(module_name: str, row: str, case: str, stages: list[int], offloads: bool = False) -> None:
    check(module_name, row, [(case, Configuration(stage, offloads=offloads)) for stage in stages])


def save_and_resume(case: layouts.LayoutCase, folder: Path) -> None:
    layouts.train_and_save(case, folder, 2)
    layouts.load_and_train(case, folder / "step-00000002", 3)


def save_and_read_whole_states(stage: int, folder: Path) -> None:
    (way, *_) = distributed_state.WAYS
    distributed_state.go_on(way, None, folder / "saved", stage)


ONE_LAYER = replace(muon.CONFIG, num_layers=1)
OF_MATRICES = [
    [muon.Case(3, 2, offload=muon.HOST, model=ONE_LAYER)],
    [muon.Case(1, 2, offload=OPTIMIZER, model=ONE_LAYER)],
    [muon.Case(2, 1, 2, model=ONE_LAYER)],
]
SCENARIOS: dict[str, tuple[Any, ...]] = {  # (number of ranks, function, arguments)
    "a block is skipped that was gathered ahead": (
        2,
        plain.train_with_zero,
        plain.case_of(name="albert", stage=3, bucket_numel=2000, prefetch_numel=10**9),
    ),
    "uneven data": (2, run_case, test_ranks.__name__, "uneven-data", "uneven_batches", [1, 3]),
    "changed parameters": (
        2,
        check_all,
        [gathered.check_changes_reach_ranks_and_optimizer],
        configs(1, 3, bucket_numel=[4000], overlap_gather=[True]),
    ),
    "sharded initialization": (2, sharded_init.check_values, sharded_init.copied, ZeroConfig(3), 0, None),
    "a list of optimizers": (
        2,
        run_case,
        lists.__name__,
        "lists-of-optimizers",
        "optimizers_of_disjoint_parameters",
        [0, 1, 3],
        True,
    ),
    "experts that no rank used": (2, run_case, test_ranks.__name__, "unused-parameters", "unused_experts", [3]),
    "backwards that end early": (2, end_backwards_early),
    "operations of graphs": (2, run_operations_of_graphs),
    "layers": (2, call_with, layers.run_split, [(layout, torch.arange(12), None) for layout in layers.LAYOUTS]),
    "initial values": (4, layers.tiny_part),
    "matrices": (2, call_with, muon.train, OF_MATRICES),
    "a context": (2, context.train_case, context.Case(1, 2, False, ZeroConfig(2, bucket_numel=2000), "keep")),
    "logits of a context": (2, context.logits_and_traffic),
}
FILES = {
    "a run that is resumed": (2, save_and_resume, layouts.LayoutCase(1, 2)),
    "a run that is resumed from the host": (2, save_and_resume, layouts.LayoutCase(3, 2, offload=HOST)),
    "whole tensors of a state dict": (2, save_and_read_whole_states, 3),
    "exported weights": (4, weights_out.train_and_export, weights_out.CASES[1]),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_scenario_races(name: str):
    num_ranks, function, *arguments = SCENARIOS[name]
    run_checked(num_ranks, function, *arguments)


@pytest.mark.parametrize("name", FILES)
def test_no_files_race(name: str, tmp_path: Path):
    num_ranks, function, case = FILES[name]
    run_checked(num_ranks, function, case, tmp_path)
