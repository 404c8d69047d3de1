"""Training steps of one rank of any world, on tensors without values: the same builder, the same step.

What the imitation replaces: the process group (`imitated_world`), the tensors (`QuickFakeTensorMode`) and the batches
(zeros). What is found is exact for the imitated backend, but for dropout on GPUs, whose masks take less memory there.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpt.build import TrainState, build, build_mesh
from gpt.settings import Settings
from gpt.train_step import train_step
from parallel.instruments.comm_log import CommEvent
from parallel.instruments.fake_tensors import QuickFakeTensorMode
from parallel.instruments.kernel_log import Kernel, KernelLog
from parallel.instruments.memory_tracker import MemoryTracker, TensorKind
from parallel.instruments.operation_observer import observe_operations
from parallel.launch.cluster import ClusterSpec
from parallel.world import World, imitated_world


@dataclass(frozen=True)
class Recording:
    """What a rank did in a step that had one before it. Bytes by kind; `resident` is between two steps."""

    state: TrainState
    resident: dict[str, dict[TensorKind, int]]  # of "device" and of "host"
    peak: dict[str, dict[TensorKind, int]]
    num_allocations: dict[str, dict[TensorKind, int]]
    building_peak_bytes: int
    events: list[CommEvent]  # times are counts of kernels
    kernels: list[Kernel]


def dry_run(settings: Settings) -> Recording:
    """Raises ConfigError where the settings and the imitated world don't go together."""
    chosen = settings.dry_run
    assert chosen.world_size is not None
    cluster = ClusterSpec.load(chosen.cluster) if chosen.cluster else None
    local_size = min(chosen.world_size, cluster.gpus_per_node) if cluster else chosen.world_size
    with imitated_world(chosen.rank, chosen.world_size, local_size, chosen.backend) as world:
        return record_step(settings, world, QuickFakeTensorMode())


def record_step(
    settings: Settings, world: World, tensors: AbstractContextManager[Any], num_steps_before: int = 1
) -> Recording:
    """In any world, also a real one: `tensors` is the context in which they are made."""
    mesh = build_mesh(settings, world)
    with tensors, MemoryTracker(world.device) as tracker:
        state = build(settings, mesh, world.device)
        building_peak_bytes = tracker.device.peak_total
        micro_batches = blank_micro_batches(settings, mesh.data.size)
        gc.collect()  # what building has left
        with no_garbage_collection():
            for _ in range(num_steps_before):
                train_step(state.model, state.optimizer, micro_batches, mesh)
            tracker.restart()
            kernel_log = KernelLog(lambda: mesh.log.phase, tracker.is_on_host)
            mesh.log.clear()
            with observe_operations(kernel_log), mesh.log.keeping_events(kernel_log.count) as events:
                train_step(state.model, state.optimizer, micro_batches, mesh)
        memories = {"device": tracker.device, "host": tracker.host}
        return Recording(
            state,
            {name: dict(+memory.resident) for name, memory in memories.items()},
            {name: dict(+memory.peak) for name, memory in memories.items()},
            {name: dict(+memory.num_allocations) for name, memory in memories.items()},
            building_peak_bytes,
            events,
            kernel_log.kernels,
        )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A step leaves no cycles, and looking for them among a deep model's objects takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def blank_micro_batches(settings: Settings, data_size: int) -> list[torch.Tensor]:
    """One rank's of a step at full batch size."""
    train, seq_length = settings.train, settings.model.seq_length
    num_micro_batches = train.global_batch_size // (train.micro_batch_size * data_size)
    shape = train.micro_batch_size, seq_length + 1
    return [torch.zeros(shape, dtype=torch.int64) for _ in range(num_micro_batches)]
