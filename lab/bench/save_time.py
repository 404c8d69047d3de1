"""Compare saves, snapshots and loads with plain copies of the same bytes, and with DCP: stall, bandwidth, peak memory.

scripts/bench/save_time.sh starts this on every rank. A round measures every kind of save and copy once. Results are the
medians over rounds of the times, and of the ratios of two times of one round.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gpt.builder.train_state import TrainState, build
from gpt.checkpoint.checkpoint import RunSaver, load, rank_state
from gpt.checkpoint.folder import Kept
from gpt.checkpoint.layout import Progress
from gpt.checkpoint.snapshots import Snapshots
from gpt.settings.data import DataSettings
from gpt.settings.run import CheckpointSettings
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from lab.pages.markdown import table
from parallel.mesh import Mesh
from parallel.store import shared_store
from parallel.world import start_world, stop_world
from zero.dcp.state import DistributedState
from zero.partition.config import ZeroConfig
from zero.state.sealed_file import CHUNK_BYTES, flush
from zero.state.writer import HostCopies

MODEL = ModelConfig(16, 640, 10, 128, 8192, dropout=0.0)  # 84 million parameters: 1 GB of masters and moments


def save(saver: RunSaver, progress: Progress) -> None:
    saver.start(progress)
    saver.wait()


def build_state(stage: int, device: torch.device) -> TrainState:
    mesh = Mesh.create(1, device.type)
    train = TrainSettings(precision="bf16", micro_batch_size=1, global_batch_size=mesh.data.size)
    return build(Settings(MODEL, DataSettings(path="unused"), zero=ZeroConfig(stage), train=train), mesh, device)


def train_step(state: TrainState) -> None:
    ids = torch.zeros(1, 17, dtype=torch.int64, device=state.device)
    state.model(ids[:, :-1], ids[:, 1:]).backward()
    state.optimizer.step()


def plain_write(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            for part in tensor.detach().reshape(-1).split(CHUNK_BYTES // tensor.element_size()):
                file.write(memoryview(part.cpu().view(torch.uint8).numpy()))
        flush(file)
    path.unlink()


class Bench:
    def __init__(self, state: TrainState, folder: Path):
        self.state, self.folder = state, folder
        self.savers = {
            name: RunSaver(folder / name, state, kept=Kept(1), is_async=name == "asynchronous")
            for name in ("waiting", "asynchronous")
        }
        in_memory = CheckpointSettings(snapshot_every=1)
        self.snapshots = Snapshots(in_memory, folder, state, {}, on_chunk=lambda: None)
        self.shared = {"app": DistributedState(state.model, state.optimizer)}
        self.plain_copies = HostCopies(torch.device("cpu"))
        self.tensors = rank_state(state).tensors()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.step = 0

    def seconds(self, action: Callable[[], object]) -> float:
        self.state.mesh.barrier()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def round(self) -> dict[str, float]:
        self.step += 1
        progress, mesh = Progress(self.step), self.state.mesh
        waiting, asynchronous = self.savers.values()
        plain_file, of_dcp = self.folder / f"plain-{mesh.rank}", self.folder / f"dcp-{self.step}"
        found = {
            "copy to memory": self.seconds(lambda: self.plain_copies.take(self.tensors)),
            "write to disk": self.seconds(lambda: plain_write(plain_file, self.tensors)),
            "save, waiting": self.seconds(lambda: save(waiting, progress)),
            "save, asynchronous: stall": (stall := self.seconds(lambda: asynchronous.start(progress))),
            "save, asynchronous: until complete": stall + self.seconds(asynchronous.wait),
            "snapshot: stall": self.seconds(lambda: self.snapshots.save(progress)),
            "step while a snapshot is written": self.seconds(lambda: train_step(self.state)),
        }
        self.snapshots.settle()
        found["step"] = self.seconds(lambda: train_step(self.state))
        futures: list[Any] = []
        stall = self.seconds(lambda: futures.append(dcp.async_save(self.shared, checkpoint_id=of_dcp)))
        found["DCP's async_save: stall"] = stall
        start = time.perf_counter()  # without a barrier, which would wait for DCP's own collectives
        futures[0].result()
        found["DCP's async_save: until complete"] = stall + time.perf_counter() - start
        mesh.barrier()
        if mesh.rank == 0:
            shutil.rmtree(of_dcp)
        return found


def peak_growth(action: Callable[[], object], above_what_stays: bool = True) -> int:
    """Return the bytes by which resident memory during an action exceeds its value before, or that after if larger.

    If not `above_what_stays`, only the value before the action counts.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process_memory("VmRSS")
    action()
    return process_memory("VmHWM") - (max(before, process_memory("VmRSS")) if above_what_stays else before)


def process_memory(name: str) -> int:
    """Return the bytes of a field of /proc/self/status: VmRSS is the resident memory, VmHWM its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure; default: the system's temporary folder"
    )
    options = parser.parse_args()
    world = start_world()
    store = shared_store()
    if world.is_first:
        store.set("folder", tempfile.mkdtemp(dir=options.folder))
    folder = Path(store.get("folder").decode())
    state = build_state(2, world.device)
    train_step(state)
    bench = Bench(state, folder)
    for _ in range(2):  # allocates the host copies; from the third round on a save deletes an old snapshot
        bench.round()
    rounds = [bench.round() for _ in range(options.rounds)]
    saved = peak_growth(lambda: save(bench.savers["waiting"], Progress(99)))
    other = build_state(3, world.device)
    loaded = peak_growth(lambda: load(folder / "waiting" / "step-00000099", other))
    if world.is_first:
        report(rounds, bench.num_bytes, {"save, waiting": saved, "load at another stage": loaded})
    bench.snapshots.delete_all()
    state.mesh.barrier()
    if world.is_first:
        shutil.rmtree(folder)
    stop_world()


def report(rounds: list[dict[str, float]], num_bytes: int, peaks: dict[str, int]) -> None:
    print(f"{num_bytes / 1e6:.0f} MB a rank, {len(rounds)} rounds, first rank\n")
    rows = []
    for name in rounds[0]:
        seconds = statistics.median(found[name] for found in rounds)
        plain = "copy to memory", "write to disk"
        ratios = (f"{statistics.median(found[name] / found[one] for found in rounds):.2f}" for one in plain)
        rows.append([name, f"{1e3 * seconds:.0f}", f"{num_bytes / seconds / 1e9:.2f}", *ratios])
    print(*table(["", "median ms", "GB/s", "x plain copy to memory", "x plain write to disk"], rows), sep="\n")
    for name, peak in peaks.items():
        print(f"\n{name}: host memory at most {peak / 1e6:.0f} MB above its value before or after")


if __name__ == "__main__":
    main()
