"""Checkpoints that DeepSpeed's own package has written: a run goes on here with the losses that it has there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from tests.distributed.zero.test_distributed_state import groups_of, module
from tests.ranks import run_ranks
from tests.source_files import ROOT
from zero import ZeroConfig, ZeroDataParallel, ZeroOptimizer, load_distributed

pytest.importorskip("deepspeed", reason="needs pip install deepspeed==0.19.8")
pytestmark = pytest.mark.oracle


def losses_here(folder: Path, stage: int, dtype: torch.dtype | None) -> list[float]:
    data = Mesh.create(1).data
    model = ZeroDataParallel(module(torch.float32), data, ZeroConfig(stage, bucket_numel=40), param_dtype=dtype)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, groups_of(model.module), lr=1.0)
    load_distributed(folder, model, optimizer)
    losses = []
    for number in range(3, 8):
        inputs = torch.randn(8, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        loss = model(inputs.to(dtype or torch.float32)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "zero"),
    [(2, {"stage": 1}), (4, {"stage": 1}), (2, {"stage": 2, "round_robin_gradients": True}), (2, {"stage": 3})],
)
def test_a_run_goes_on_with_the_same_losses(tmp_path: Path, num_ranks: int, zero: dict[str, Any], bf16: bool):
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    run = ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "-m", "tests.oracle.train_by_deepspeed"]
    subprocess.run([sys.executable, *run, str(tmp_path), json.dumps(config)], cwd=ROOT, check=True, timeout=300)
    expected = json.loads((tmp_path / "losses-0.json").read_text())
    universal = tmp_path / "universal"
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(tmp_path / "global_step3"), "--output_folder", str(universal)]
    subprocess.run([sys.executable, *convert, *folders], cwd=ROOT, check=True, timeout=300)
    loads = [(tmp_path, 2, 3), (tmp_path, 4, 2), (tmp_path, 1, 0)]
    if "round_robin_gradients" not in zero:  # whose parameters are mixed up by the conversion
        loads.append((universal, 2, 3))
    for folder, ranks, stage in loads:
        for losses in run_ranks(ranks, losses_here, folder, stage, torch.bfloat16 if bf16 else None):
            assert losses == expected
