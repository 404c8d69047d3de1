"""Train by DeepSpeed on the ranks of torchrun; save a checkpoint after three steps, and the losses of the next five."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

from tests.distributed.zero.test_distributed_state import groups_of, module


def main(folder: str, config: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    model = module(torch.float32)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups_of(model), lr=1e-2), config=json.loads(config)
    )
    losses = [step(engine, number) for number in range(3)]
    engine.save_checkpoint(folder)
    losses = [step(engine, number) for number in range(3, 8)]
    Path(folder, f"losses-{torch.distributed.get_rank()}.json").write_text(json.dumps(losses))


def step(engine: nn.Module, number: int) -> float:
    inputs = torch.randn(8, 15, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = engine(inputs.to(next(engine.parameters()).dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
