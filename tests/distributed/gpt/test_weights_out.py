"""Export of weights from training at any layout to transformers: the same logits, one unit in memory at a time."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from gpt.checkpoint.export import LiveExports, export_checkpoint
from gpt.checkpoint.folder import Kept
from gpt.generate import evaluation
from gpt.pretrained import weights
from gpt.pretrained.tensors import to_transformers
from tests.distributed.gpt.test_checkpoint_layouts import CONFIG, LayoutCase, build, save, train
from tests.ranks import run_ranks
from zero.core.partition.stage import Lifetime
from zero.data_parallel import ZeroDataParallel

IDS = torch.arange(2 * CONFIG.seq_length).view(2, -1) % CONFIG.vocab_size
LARGEST_UNIT = 1  # one of the units: the blocks, and the root with the rest


def train_and_export(case: LayoutCase, folder: Path) -> tuple[Tensor, list[int]]:
    """Return the logits after two steps, and the number of unsharded units whenever a parameter was written."""
    state, num_gathered = build(case), []
    train(state, 0, 2)

    def watched(*arguments: Any) -> dict[str, Tensor]:
        num_gathered.append(count_gathered(state.model))
        return to_transformers(*arguments)

    with mock.patch.object(weights, "to_transformers", watched):
        LiveExports(state, folder / "live", Kept(1), {}).export(2)
    save(state, folder, 2)
    with torch.no_grad(), evaluation(state.model):
        return state.model(IDS), num_gathered


def count_gathered(model: ZeroDataParallel) -> int:
    return sum(flat.lifetime is Lifetime.TRANSIENT and flat.full.untyped_storage().size() > 0 for flat in model.flats)


CASES = [LayoutCase(0), LayoutCase(3, 2, 2, is_split=True)]


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_the_run(tmp_path, case):
    results = run_ranks(case.num_ranks, train_and_export, case, tmp_path)
    num_parameters = export_checkpoint(tmp_path / "step-00000002", tmp_path / "offline", torch.float64)
    logits, num_gathered = results[0]
    assert len(num_gathered) == 4 + 12 * CONFIG.num_layers
    assert max(num_gathered) == (LARGEST_UNIT if case.stage == 3 else 0)
    for folder in ("live/step-00000002", "offline"):
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path / folder, dtype=torch.float64).eval()
        torch.testing.assert_close(theirs(IDS).logits, logits, rtol=1e-10, atol=1e-10)
    padding = 128 * CONFIG.hidden_size - CONFIG.vocab_size * CONFIG.hidden_size
    assert num_parameters == sum(param.numel() for param in theirs.parameters()) + padding


def test_half_precision_weights_are_the_rounded_masters(tmp_path):
    run_ranks(2, train_and_export, LayoutCase(2, 2), tmp_path)
    exported = {}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        export_checkpoint(tmp_path / "step-00000002", tmp_path / str(dtype), dtype)
        exported[dtype] = GPT2LMHeadModel.from_pretrained(tmp_path / str(dtype), dtype=dtype).state_dict()
    for dtype, state in exported.items():
        assert all(state[name].equal(value.to(dtype)) for name, value in exported[torch.float64].items())
