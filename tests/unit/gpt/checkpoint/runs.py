"""Checkpoints of tiny runs of two ranks, what one process loads from them, and files that are changed and sealed again.

run-a/step-00000001, run-a/step-00000002    of one run
run-b/step-00000002                         of another run, with other weights
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.builder.train_state import TrainState, build
from gpt.checkpoint.checkpoint import RunSaver, load, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.settings.data import DataSettings
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from zero.checkpoint.layout_file import LAYOUT
from zero.checkpoint.sealed_file import CHECKSUM, NO_CHECKSUM, checksum_digits, checksum_offset, verify, write_json
from zero.settings.config import ZeroConfig

MODEL = ModelConfig(1, 8, 2, 4, vocab_size=20, vocab_multiple=4, dropout=0.0)
DATA = {"train.seed": 1234, "data.split": [0.9, 0.05, 0.05]}
RANK_FILES = ("rank-00000.safetensors", "rank-00001.safetensors")
NAMES = (LAYOUT, *RANK_FILES)


def tiny_state(seed: int = 77, **model: Any) -> TrainState:
    settings = Settings(
        model=replace(MODEL, **model),
        data=DataSettings("nowhere"),
        train=TrainSettings(precision="fp32", seed=seed),
        zero=ZeroConfig(1, bucket_numel=256),
    )
    return build(settings, Mesh.create(1), torch.device("cpu"))


def train_step(state: TrainState, seed: int) -> None:
    ids = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(seed))
    state.model(ids[:, :-1], ids[:, 1:]).backward()
    state.optimizer.step()


def save_runs(folder: Path) -> None:
    """Write the checkpoints. Two ranks call it."""
    for run, steps in (("run-a", (1, 2)), ("run-b", (2,))):
        state = tiny_state(len(steps))
        saver = RunSaver(folder / run, state, kept=Kept(9), is_async=False, data=DATA)
        for step in range(1, 3):
            train_step(state, 10 * step + len(steps))
            if step in steps:
                saver.start(Progress(step, 2 * step, run))
                saver.wait()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass(frozen=True)
class Loaded:
    """All that a run continues with."""

    progress: Progress
    tensors: dict[str, Tensor]

    def equals(self, other: "Loaded") -> bool:
        return (
            asdict(self.progress) == asdict(other.progress)
            and self.tensors.keys() == other.tensors.keys()
            and all(tensor.equal(other.tensors[name]) for name, tensor in self.tensors.items())
        )


def load_in_one_process(checkpoint: Path, **model: Any) -> Loaded:
    state = tiny_state(**model)
    progress = load(checkpoint, state, DATA)
    return Loaded(progress, {name: tensor.clone() for name, tensor in rank_state(state).tensors().items()})


def change_layout(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of layout.json, and seal it again."""
    content = json.loads((checkpoint / LAYOUT).read_text())
    del content["crc32"]
    change(content)
    write_json(checkpoint / LAYOUT, content)


def change_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a file of tensors, and seal the file again, but not layout.json."""
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    header["__metadata__"]["crc32"] = NO_CHECKSUM
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(sealed(len(text).to_bytes(8, "little") + text + content[8 + header_bytes :]))


def sealed(content: bytes) -> bytes:
    """Return the content with its checksum, if it has zeros in place of one."""
    if NO_CHECKSUM.encode() not in content or not CHECKSUM.search(content):
        return content
    start = checksum_offset(content)
    return content[:start] + checksum_digits(zlib.crc32(content)) + content[start + len(NO_CHECKSUM) :]


def seal_files(checkpoint: Path) -> None:
    """Write the seals of the files, as they are now, into layout.json."""

    def change(content: dict[str, Any]) -> None:
        seals = [verify(checkpoint / name) for name in RANK_FILES]
        content["files"] = [[seal.checksum, seal.num_bytes] for seal in seals]

    change_layout(checkpoint, change)
