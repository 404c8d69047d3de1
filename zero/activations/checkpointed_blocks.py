"""Activation checkpoints (ZeRO-R): a model's blocks run in groups, and only the input of each group is kept.

    forward    input -> put                       group -> the next group's input
    backward   take -> the group runs again, with the same dropout -> its gradients
               at the same time the input of the group before it is fetched

A store (`zero/activations/stores.py`) decides where an input is kept between forward and backward.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from parallel.blocks import Recomputation, RunBlock, run_in_order
from parallel.errors import ConfigError
from parallel.mesh import Axis, Handle
from zero.activations.choice import Hardware
from zero.activations.slab import Slot
from zero.activations.stores import STORES, ActivationStore, StoreContext, StoredBytes, StoreName
from zero.offload.streams import SideStream

StoreChoice = Literal["none", "selective", StoreName, "auto"]


@dataclass(frozen=True)
class ActivationsConfig:
    """The activations that a training step keeps between forward and backward, and where it keeps them."""

    store: StoreChoice = "none"
    """none: keep all, on the device; selective: all but the inside of attention, which is computed again. The others
    keep only checkpoints. keep: on the device; partition: divided over the tensor ranks (P_a); partition_host: divided
    over the tensor ranks, in host memory (P_a+cpu); auto: one of these three, by the paper's section 8."""
    layers_per_checkpoint: int = 1
    """Number of blocks that share a checkpoint and are computed again together; the last group may be smaller."""
    defragment: bool = True
    """M_D: checkpoints are copied into slabs that are allocated once; false: each is allocated anew."""
    hardware: Hardware = field(default_factory=Hardware)
    """The device and its links, from which auto computes its choice."""

    def __post_init__(self) -> None:
        choices = get_args(StoreChoice)
        if self.store not in choices:
            raise ConfigError(f"ActivationsConfig.store={self.store} is unknown; choose one of {', '.join(choices)}")
        if self.layers_per_checkpoint < 1:
            raise ConfigError(
                f"ActivationsConfig.layers_per_checkpoint={self.layers_per_checkpoint} is below 1; choose 1 or more, "
                "or ActivationsConfig.store=none for no checkpoints"
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
    stored: Any
    memory_key: tuple  # (slot, size, dtype): checkpoints with the same one have the same memory in a slab
    generation: int  # number of earlier checkpoints with the same key
    previous: "Checkpoint | None"  # of the group before it


class CheckpointedBlocks:
    """A `RunBlocks` that runs a model's blocks with one checkpoint for each group of them.

    With `reuses_memory` a forward overwrites the checkpoints of the one before it, whose backward must have ended.
    """

    def __init__(self, store: ActivationStore, layers_per_checkpoint: int, stream: SideStream, reuses_memory: bool):
        self._store, self._layers_per_checkpoint = store, layers_per_checkpoint
        self._stream, self._reuses_memory = stream, reuses_memory
        self._generations: dict[tuple, int] = {}
        self._latest: Callable[[], Checkpoint | None] = lambda: None
        self._prefetched: tuple[Checkpoint, Tensor, Handle] | None = None

    def __call__(self, blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
        # A backward that ended early has not waited for the checkpoint it was fetching, whose memory is used again now.
        self._wait_for_prefetch()
        starts = range(0, len(blocks), self._layers_per_checkpoint)
        for number, first in enumerate(starts):
            group = partial(run_in_order, blocks[first : first + self._layers_per_checkpoint])
            # Inside the group torch's own hooks are the innermost, so these see only what `checkpoint` itself saves: x.
            # Without gradients it saves nothing, so evaluation and generation store nothing.
            with saved_tensors_hooks(partial(self._put, Slot(number, len(starts))), self._take):
                x = checkpoint(group, x, use_reentrant=False, preserve_rng_state=True)
        return x

    def num_bytes(self, num_blocks: int, numel: int, itemsize: int) -> StoredBytes:
        """Return the bytes that the checkpoints of one forward occupy, if each has `numel` elements."""
        return self._store.num_bytes(math.ceil(num_blocks / self._layers_per_checkpoint), numel, itemsize)

    @torch.no_grad()
    def _put(self, slot: Slot, activation: Tensor) -> Checkpoint | Tensor:
        """Store the input of a group. Autograd calls this when it saves the tensor."""
        if not activation.numel():  # older versions of torch also save an empty tensor of their own
            return activation
        key = slot, activation.numel(), activation.dtype
        self._generations[key] = generation = self._generations.get(key, -1) + 1
        latest = self._latest()
        previous = latest if latest is not None and latest.slot.number == slot.number - 1 else None
        stored = self._store.put(slot, activation)
        made = Checkpoint(slot, stored, key, generation, previous)
        self._latest = weakref.ref(made)  # weak: only autograd decides how long a checkpoint is kept
        return made

    @torch.no_grad()
    def _take(self, wanted: Checkpoint | Tensor) -> Tensor:
        """Return the input of a group, and start to fetch that of the group before it.

        Autograd calls this when it first needs the group, which then runs again while the other is fetched.
        """
        if isinstance(wanted, Tensor):
            return wanted
        if self._prefetched is None or self._prefetched[0] is not wanted:
            self._wait_for_prefetch()
            self._prefetched = self._fetch(wanted)
        _, activation, arrival = self._prefetched
        arrival.wait()
        # The next fetch may overwrite the buffer of the group that ran before this one. It starts after all computation
        # that is queued by now, hence after that buffer has been read.
        self._prefetched = self._fetch(wanted.previous) if wanted.previous is not None else None
        return activation

    def _fetch(self, wanted: Checkpoint) -> tuple[Checkpoint, Tensor, Handle]:
        """Start to fetch a checkpoint. Raise ValueError if a later forward has overwritten it."""
        if self._reuses_memory and wanted.generation != self._generations[wanted.memory_key]:
            raise ValueError(
                f"a later forward has overwritten checkpoint {wanted.slot.number} before the backward that needs it; "
                "run each backward before the next forward, or set ActivationsConfig.defragment=false"
            )
        with self._stream.context():
            activation, arrival = self._store.take(wanted.slot, wanted.stored)
        queued = self._stream.device_handle()
        return wanted, activation, Handle(arrival.wait, queued.wait)

    def _wait_for_prefetch(self) -> None:
        """Wait until the prefetched checkpoint is complete: its memory must not be freed or reused while written."""
        if self._prefetched is not None:
            self._prefetched[2].wait()
            self._prefetched = None


def checkpointed_blocks(
    config: ActivationsConfig, replicas: Axis | None = None, device: torch.device | None = None
) -> CheckpointedBlocks | None:
    """Return what runs the blocks under these settings, or None if the model runs them without checkpoints.

    `replicas` is the axis along which all ranks hold the same activations. Raises ConfigError as `check_replicas`.
    """
    if config.store not in STORES:
        return None
    replicas, device = replicas or Axis.trivial("tensor"), device or torch.device("cpu")
    check_replicas(config, replicas)
    stream = SideStream(device)
    store = STORES[config.store](StoreContext(replicas, device, stream, config.defragment))
    return CheckpointedBlocks(store, config.layers_per_checkpoint, stream, reuses_memory=config.defragment)


def check_replicas(config: ActivationsConfig, replicas: Axis) -> None:
    """Raise ConfigError if activations are to be partitioned and no two ranks hold the same ones."""
    if config.store == "partition" and replicas.size == 1:
        raise ConfigError(
            "ActivationsConfig.store=partition: no 2 tensor ranks hold the same activations, so there is nothing to "
            "partition; choose keep or partition_host, or start 2 or more tensor ranks without sequence parallelism, "
            "which divides activations by itself"
        )


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function` such that only its arguments are kept for backward, where it is called again."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=True)
