"""Activation checkpoints (ZeRO-R): a model's blocks run in groups, and only the input of each group is kept.

    forward    input -> put                       group -> the next group's input
    backward   take -> the group runs again, with the same dropout -> its gradients
               at the same time, the input of the group before it is fetched

A store (`zero/activations/stores.py`) decides where an input is kept between forward and backward.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from parallel.mesh import Axis, Work
from parallel.tensor.blocks import Recomputation, RunBlock, run_in_order
from parallel.validation.errors import ConfigError
from parallel.validation.fields import Positive, Range, checked
from zero.activations.choice import Hardware
from zero.activations.stores import STORES, ActivationStore, Slot, StoreName, make_store
from zero.core.memory.streams import SideStream

StoreChoice = Literal["none", "selective", StoreName, "auto"]


@checked
class ActivationsConfig:
    """The activations that a training step keeps between forward and backward, and where it keeps them."""

    store: StoreChoice = "none"
    """none: keep all activations, on the device; selective: keep all but those inside attention, which are computed
    again. The others keep checkpoints only. keep: on the device; partition: divided over the tensor ranks (P_a);
    partition_host: divided over the tensor ranks, in host memory (P_a+cpu); auto: one of these three, by the arithmetic
    of the paper's section 8."""
    layers_per_checkpoint: Positive = 1
    """Number of blocks that share a checkpoint and are computed again together; the last group may be smaller."""
    defragment: bool = True
    """M_D: checkpoints are copied into memory that is allocated once; false: new memory is allocated for each."""
    hardware: Hardware = field(default_factory=Hardware)
    """The device and its links, from which auto computes its choice."""
    budget: Annotated[float, Range(0, 1)] | None = None
    """With train.compile=blocks, store=none and no dropout: a compiled block may save this share of what it would save
    for backward beyond its inputs; torch computes the rest again. null: torch's own choice, which is 1."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.store != "none":
            raise ConfigError(
                f"ActivationsConfig.budget={self.budget} divides what store=none keeps, and store={self.store}; choose "
                "store=none, or budget=null"
            )

    @property
    def recomputes(self) -> Recomputation:
        """The part of the model that is computed again in backward."""
        if self.store in STORES:
            return "blocks"
        return "attention" if self.store == "selective" else "nothing"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The input of one group in one forward. Autograd holds it until the group's backward has run."""

    slot: Slot
    stored: Any  # what the store's `put` has returned
    memory_key: tuple  # (slot, number of elements, dtype): checkpoints with equal keys share memory in a slab
    generation: int  # the number of earlier checkpoints with the same key
    previous: "Checkpoint | None"  # the checkpoint of the group before it, in the same forward


class Fetch(NamedTuple):
    """A checkpoint that is being fetched. Wait on `work` before `activation` is read."""

    checkpoint: Checkpoint
    activation: Tensor
    work: Work


class CheckpointedBlocks:
    """A `RunBlocks` that runs a model's blocks with one checkpoint for each group of them.

    With `reuses_memory` a forward overwrites the checkpoints of the forward before it, whose backward must have ended.
    """

    def __init__(self, store: ActivationStore, layers_per_checkpoint: int, stream: SideStream, reuses_memory: bool):
        self._store, self._layers_per_checkpoint = store, layers_per_checkpoint
        self._stream, self._reuses_memory = stream, reuses_memory
        self._generations: dict[tuple, int] = {}  # of the newest checkpoint with each memory key
        self._latest: Callable[[], Checkpoint | None] = lambda: None
        self._prefetch: Fetch | None = None

    def __call__(self, blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
        # First: if the last backward ended early, a prefetch may still be writing to memory that this forward reuses.
        self._wait_for_prefetch()
        starts = range(0, len(blocks), self._layers_per_checkpoint)
        for number, first in enumerate(starts):
            group = partial(run_in_order, blocks[first : first + self._layers_per_checkpoint])
            # Inside the group, the hooks of torch's `checkpoint` replace these, which therefore see only the tensor
            # that `checkpoint` itself saves: x. Without gradients it saves none, so evaluation stores nothing.
            with saved_tensors_hooks(partial(self._put, Slot(number, len(starts))), self._take):
                x = checkpoint(group, x, use_reentrant=False, preserve_rng_state=True)
        return x

    @torch.no_grad()
    def _put(self, slot: Slot, activation: Tensor) -> Checkpoint | Tensor:
        """Store the input of a group. Autograd calls this when it saves the tensor."""
        if not activation.numel():  # older versions of torch also save an empty tensor that is not a group's input
            return activation
        key = slot, activation.numel(), activation.dtype
        self._generations[key] = generation = self._generations.get(key, -1) + 1
        latest = self._latest()
        previous = latest if latest is not None and latest.slot.number == slot.number - 1 else None
        stored = self._store.put(slot, activation)
        new = Checkpoint(slot, stored, key, generation, previous)
        self._latest = weakref.ref(new)  # weak: only autograd decides how long a checkpoint is kept
        return new

    @torch.no_grad()
    def _take(self, saved: Checkpoint | Tensor) -> Tensor:
        """Return the input of a group, and start to fetch the input of the group before it.

        Autograd calls this when backward reaches a group. The group then runs again while the other input is fetched.
        """
        if isinstance(saved, Tensor):
            return saved
        if self._prefetch is None or self._prefetch.checkpoint is not saved:
            self._wait_for_prefetch()
            self._prefetch = self._fetch(saved)
        activation = self._prefetch.activation
        self._prefetch.work.wait()
        # Only now: the next fetch may overwrite the buffer of the group that ran again before this one. It starts after
        # all computation that is queued so far, hence after that buffer has been read.
        self._prefetch = None if saved.previous is None else self._fetch(saved.previous)
        return activation

    def _fetch(self, wanted: Checkpoint) -> Fetch:
        """Start to fetch a checkpoint. Raises ValueError if a later forward has overwritten it."""
        if self._reuses_memory and wanted.generation != self._generations[wanted.memory_key]:
            raise ValueError(
                f"a later forward has overwritten checkpoint {wanted.slot.number} before the backward that needs it; "
                "run each backward before the next forward, or set ActivationsConfig.defragment=false"
            )
        with self._stream.context():
            activation, collective = self._store.take(wanted.slot, wanted.stored)
        copy = self._stream.device_work()
        return Fetch(wanted, activation, Work(collective.wait, copy.wait))

    def _wait_for_prefetch(self) -> None:
        """Wait for the prefetch that is running, if any: its memory must not be freed or reused before it ends."""
        if self._prefetch is not None:
            self._prefetch.work.wait()
            self._prefetch = None


def checkpointed_blocks(
    config: ActivationsConfig, replicas: Axis | None = None, device: torch.device | None = None
) -> CheckpointedBlocks | None:
    """Return the `RunBlocks` for these settings, or None if they use no checkpoints.

    `replicas` is the axis whose ranks all hold the same activations. Raises ConfigError as `check_replicas` does.
    """
    if config.store not in STORES:
        return None
    replicas, device = replicas or Axis.trivial("tensor"), device or torch.device("cpu")
    check_replicas(config, replicas)
    stream = SideStream(device)
    store = make_store(config.store, replicas, device, stream, config.defragment)
    return CheckpointedBlocks(store, config.layers_per_checkpoint, stream, reuses_memory=config.defragment)


def check_replicas(config: ActivationsConfig, replicas: Axis) -> None:
    """Raise ConfigError if checkpoints are to be partitioned, but no two ranks hold the same activations."""
    if config.store == "partition" and replicas.size == 1:
        raise ConfigError(
            "ActivationsConfig.store=partition: no 2 tensor ranks hold the same activations, so there is nothing to "
            "partition; choose keep or partition_host, or start 2 or more tensor ranks without sequence parallelism, "
            "which divides activations by itself"
        )


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of `function` that keeps only its arguments for backward, and is called again there."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=True)
