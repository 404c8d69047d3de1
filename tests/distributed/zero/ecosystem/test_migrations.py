"""The loops of docs/migration.md, before and after: the real FSDP2 and ZeRO end with the same weights."""

import itertools
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero
from tests.ranks import run_cases
from tests.scenarios import WIDTH, Block, Blocks
from tests.source_files import ROOT

PAGE = (ROOT / "docs/migration.md").read_text()
LOOPS = dict(re.findall(r"^#### (.*?)\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE))
NAMES = {
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "StateDictOptions": StateDictOptions,
    "dcp": dcp,
    "fully_shard": fully_shard,
    "get_model_state_dict": get_model_state_dict,
    "get_state_dict": get_state_dict,
    "torch": torch,
    **{name: getattr(zero, name) for name in zero.__all__},
}


class LowRank(Block):
    """A block with an adapter of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(x))


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def check_loop(text: str, stage: int, folder: Path) -> None:
    is_mixed = "MixedPrecisionPolicy" in text
    torch.set_default_dtype(torch.float32 if is_mixed else torch.float64)
    states: list[dict[str, Tensor]] = []
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        torch.manual_seed(0)
        module = Blocks(LowRank(), LowRank())
        torch.manual_seed(1 + dist.get_rank())
        names: dict[str, Any] = {
            "module": module,
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "batches": list(torch.randn(4, 3, WIDTH)),
            "loss_of": loss_of,
            "folder": folder,
        }
        exec(code.replace("stage=3", f"stage={stage}"), names | NAMES, names)
        states.append(names["state"])
    assert len(states) == 2
    if dist.get_rank() == 0:
        tolerance = 1e-6 if is_mixed else 1e-10
        torch.testing.assert_close(states[1], states[0], rtol=tolerance, atol=tolerance)


def test_loops_end_with_the_weights_that_they_had_under_fsdp2(tmp_path: Path):
    assert LOOPS, "the headings of the page have changed"
    cases = itertools.product(LOOPS.values(), (3, 1))
    run_cases(2, check_loop, [(loop, stage, tmp_path / str(number)) for number, (loop, stage) in enumerate(cases)])
