"""Training steps of one rank of any world on tensors without values, with the builder and the step of a real run.

A dry run replaces the process group (`imitated_world`), the tensors (`QuickFakeTensorMode`) and the batches (zeros).
Its results are exact for the imitated backend, except for dropout on GPUs, whose masks take less memory there.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from data.documents import DocumentBatch, MicroBatch
from gpt.builder.train_state import TrainState, build, build_mesh
from gpt.settings.option_names import messages_in_option_names
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from gpt.train_step import train_step
from lab.dryrun.compiled_code import with_compiled_code
from lab.dryrun.unchecked_streams import UncheckedStreams
from lab.measure.cluster import ClusterSpec
from lab.observe.compiled_kernels import CompiledCalls
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.kernel_log import Kernel, KernelLog, events_at_times
from lab.observe.memory_tracker import MemoryHistory, MemoryTracker
from lab.observe.operation_observer import observe_operations
from lab.races.stream_checker import streams_checked
from parallel.comm_log import CommEvent
from parallel.memory_kinds import TensorKind
from parallel.world import World, imitated_world
from zero.homes.budget.recorder import NUM_RECORDED

DEVICE, HOST = "device", "host"  # the memories of a Recording
FORWARD = "forward"  # the phase that begins a micro-batch
MAX_MICRO_BATCHES = 3  # the first, the last, and one between them, which all others are like


@dataclass(frozen=True)
class Recording:
    """The memory, collectives and kernels of one rank in a step after the first.

    `resident`, `peak` and `num_allocations` are {DEVICE or HOST: {kind of tensor: bytes, or a count}}. `resident` is
    the memory that is still allocated at the end of the step.
    """

    state: TrainState
    resident: dict[str, dict[TensorKind, int]]
    peak: dict[str, dict[TensorKind, int]]
    num_allocations: dict[str, dict[TensorKind, int]]
    building_peak_bytes: int
    events: list[CommEvent]  # their times are counts of kernels; the next step waits for one that is awaited early
    kernels: list[Kernel]
    memory: MemoryHistory  # of the device; its times are counts of kernels
    num_left_out: int  # micro-batches of the step that are like the last but one, and were not run

    def num_times(self, place: float) -> int:
        """Return how often a step has what is at this place among the kernels, with the micro-batches left out."""
        return 1 + self.num_left_out * (self._last_but_one.start <= place < self._last_but_one.stop)

    @cached_property
    def _last_but_one(self) -> range:
        """The kernels of the last but one micro-batch."""
        begins = [number for number in range(len(self.kernels)) if begins_micro_batch(self.kernels, number)]
        return range(*begins[-2:]) if self.num_left_out else range(0)

    def with_kernels(self, kernels: list[Kernel], places: list[int]) -> Self:
        """Return the recording with other kernels; `places[n]` of them are before the one that was number n."""
        events = events_at_times(self.events, places)
        return replace(self, kernels=kernels, events=events, memory=self.memory.at_times(places))


def begins_micro_batch(kernels: Sequence[Kernel], number: int) -> bool:
    """Return whether a kernel is the first one of a forward."""
    return kernels[number].phase == FORWARD and (not number or kernels[number - 1].phase != FORWARD)


@messages_in_option_names()
def dry_run(settings: Settings) -> Recording:
    """Return the recording of a step of `settings.dry_run.rank`.

    Raise ConfigError if the settings do not suit the imitated world.
    """
    chosen = settings.dry_run
    assert chosen.world_size is not None
    cluster = ClusterSpec.load(chosen.cluster) if chosen.cluster else None
    if cluster and settings.activations.hardware.memory_gb is None:  # a run asks its device
        hardware = replace(settings.activations.hardware, memory_gb=cluster.gpu_memory_bytes / 1e9)
        settings = replace(settings, activations=replace(settings.activations, hardware=hardware))
    local_size = min(chosen.world_size, cluster.gpus_per_node) if cluster else chosen.world_size
    with imitated_world(chosen.rank, chosen.world_size, local_size, chosen.backend) as world:
        # Steps are alike after the first one, which allocates states and buffers, or after those whose memory
        # offload.mode=auto measures and the one that moves states to where they stay.
        num_steps_before = NUM_RECORDED + 1 if settings.offload.mode == "auto" else 1
        recording = record_step(settings, world, QuickFakeTensorMode(), num_steps_before)
    return recording.with_kernels(*with_compiled_code(recording.kernels, settings, recording.state.activations))


def record_step(
    settings: Settings, world: World, tensor_mode: AbstractContextManager[Any], num_steps_before: int
) -> Recording:
    """Build the run in any world, and record a step of few micro-batches after others.

    Tensors are made inside the context `tensor_mode`.
    """
    # Fake tensors cannot be compiled, so that torch has no graph to which a budget applies.
    activations = replace(settings.activations, budget=None)
    settings = replace(settings, train=replace(settings.train, compile="none"), activations=activations)
    mesh = build_mesh(settings, world)
    tracker = MemoryTracker(world.device)
    compiled_calls = CompiledCalls(tracker.is_on_host)
    with tensor_mode, tracker, _streams(settings, world, compiled_calls):
        state = build(settings, mesh, world.device)
        building_peak_bytes = tracker.device.peak_total
        masks_documents = settings.data.mask_documents
        num_batch_ranks, seq_length = mesh.num_batch_ranks, settings.model.seq_length
        micro_batches = blank_micro_batches(settings.train, seq_length, num_batch_ranks, masks_documents)
        # Before the collector is switched off: garbage of the builder would count as resident memory.
        gc.collect()
        few = micro_batches[: num_alike(settings, num_batch_ranks)]
        with no_garbage_collection():
            for _ in range(num_steps_before):
                with mesh.log.keeping_events(lambda: 0) as events_before:
                    train_step(state.model, state.optimizer, few, mesh, leaves=state.leaves)
            late_before = [event for event in events_before if event.awaited is None]
            # After the first steps, which allocate optimizer states and buffers: only what follows is recorded.
            tracker.restart()
            kernel_log = compiled_calls.log = KernelLog(lambda: mesh.log.phase, tracker.is_on_host)
            mesh.log.clear()
            with (
                tracker.keeping_history(kernel_log.count) as memory,
                observe_operations(kernel_log),
                mesh.log.keeping_events(kernel_log.count) as events,
            ):
                train_step(state.model, state.optimizer, few, mesh, leaves=state.leaves)
        # What the next step waits for: the step before left the same collectives, which this step has waited for.
        # Copies: an engine that ends waits for them too, by the log's own clock.
        events = [copy(event) for event in events]
        late = [event for event in events if event.awaited is None]
        for event, before in zip(late, late_before, strict=True):
            event.awaited, event.completed = before.awaited, before.completed
        usage = {DEVICE: tracker.device, HOST: tracker.host}
        resident, peak, num_allocations = (
            {name: dict(+getattr(used, field)) for name, used in usage.items()}
            for field in ("resident", "peak", "num_allocations")
        )
        recorded = events, kernel_log.kernels, memory, len(micro_batches) - len(few)
        return Recording(state, resident, peak, num_allocations, building_peak_bytes, *recorded)


def num_alike(settings: Settings, num_batch_ranks: int) -> int:
    """Return the number of a rank's micro-batches in a step of which the other ones are like one."""
    return max(MAX_MICRO_BATCHES, -(-settings.zero.leaf_blocks // num_batch_ranks))  # a block has one at least


@contextmanager
def _streams(settings: Settings, world: World, compiled_calls: CompiledCalls) -> Iterator[None]:
    """Check the streams if the settings say so; else give the run the streams and compiler of an imitated GPU."""
    with ExitStack() as stack:
        if settings.profile.check_streams:
            stack.enter_context(streams_checked(world.device))
        elif world.imitated_backend == "nccl":
            stack.enter_context(observe_operations(UncheckedStreams()))
            stack.enter_context(observe_operations(compiled_calls))
        yield


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch off Python's garbage collector, which would take a tenth of the time: a step makes no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def blank_micro_batches(
    train: TrainSettings, seq_length: int, num_batch_ranks: int, masks_documents: bool = False
) -> list[MicroBatch]:
    """Return one rank's micro-batches of a step at full batch size, all zeros.

    With `masks_documents`, each sample is one document: it takes the most time, and the memory of others.
    """
    num_samples, num_micro_batches = train.micro_batch_size, train.num_micro_batches(num_batch_ranks)
    if not masks_documents:
        shape = num_samples, seq_length + 1
        return [torch.zeros(shape, dtype=torch.int64) for _ in range(num_micro_batches)]
    zeros = torch.zeros(num_samples, seq_length, dtype=torch.int64)
    positions = torch.arange(seq_length).repeat(num_samples, 1)
    starts = torch.arange(0, (num_samples + 1) * seq_length, seq_length, dtype=torch.int32)
    return [DocumentBatch(zeros, zeros, positions, starts) for _ in range(num_micro_batches)]
