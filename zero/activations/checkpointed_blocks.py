"""Activation checkpoints (ZeRO-R): a model's blocks run a few at a time, and only the input of each group is kept.

    forward    input -> put                       group -> the next group's input
    backward   take -> the group runs again, with the same dropout -> its gradients
               meanwhile the input of the group before it is on its way

Where an input waits in between is a store's affair (`zero/activations/stores.py`).
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
from zero.activations.slab import Place
from zero.activations.stores import STORES, ActivationStore, StoreContext, StoredBytes, StoreName
from zero.offload.streams import SideStream

StoreChoice = Literal["none", "selective", StoreName, "auto"]


@dataclass(frozen=True)
class ActivationsConfig:
    """Which activations a training step keeps between forward and backward, and where."""

    store: StoreChoice = "none"
    """none: all, on the device; selective: all but the inside of attention, which runs again; the others keep the
    checkpoints only: keep: where they are; partition: divided over the tensor ranks (P_a); partition_host: that, in
    host memory (P_a+cpu); auto: what the arithmetic of the paper's section 8 says."""
    layers_per_checkpoint: int = 1
    """Blocks that run again together; the last group may be smaller."""
    defragment: bool = True
    """M_D: checkpoints go into slabs that are allocated once; false: each is allocated anew, for comparison."""
    hardware: Hardware = field(default_factory=Hardware)
    """What auto reckons with."""

    def __post_init__(self) -> None:
        choices = get_args(StoreChoice)
        if self.store not in choices:
            raise ConfigError(f"activations.store={self.store} is unknown; choose one of {', '.join(choices)}")
        if self.layers_per_checkpoint < 1:
            raise ConfigError(
                f"activations.layers_per_checkpoint={self.layers_per_checkpoint} is below 1; choose 1 or more, "
                "or activations.store=none for no checkpoints"
            )

    @property
    def recomputes(self) -> Recomputation:
        if self.store in STORES:
            return "blocks"
        return "attention" if self.store == "selective" else "nothing"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The input of one group in one forward. Autograd holds it until the group's backward has run."""

    place: Place
    stored: Any
    slot: tuple  # what has the same place, size and type has the same memory in a slab
    generation: int  # how many had this slot before
    previous: "Checkpoint | None"


class CheckpointedBlocks:
    """Runs a model's blocks, each a function of one tensor, under one checkpoint a group.

    `reuses_memory`: a forward writes over the checkpoints of the one before it, which must have had its backward.
    """

    def __init__(self, store: ActivationStore, layers_per_checkpoint: int, stream: SideStream, reuses_memory: bool):
        self._store, self._layers_per_checkpoint = store, layers_per_checkpoint
        self._stream, self._reuses_memory = stream, reuses_memory
        self._generations: dict[tuple, int] = {}
        self._latest: Callable[[], Checkpoint | None] = lambda: None
        self._ahead: tuple[Checkpoint, Tensor, Handle] | None = None

    def __call__(self, blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
        self._await_ahead()  # of a backward that stopped short
        starts = range(0, len(blocks), self._layers_per_checkpoint)
        for number, first in enumerate(starts):
            group = partial(run_in_order, blocks[first : first + self._layers_per_checkpoint])
            # Inside, checkpoint's own hooks are the innermost: these see only what the checkpoint itself keeps, x.
            # Without gradients it keeps nothing, so evaluation and generation leave no trace.
            with saved_tensors_hooks(partial(self._put, Place(number, len(starts))), self._take):
                x = checkpoint(group, x, use_reentrant=False, preserve_rng_state=True)
        return x

    def num_bytes(self, num_blocks: int, numel: int, itemsize: int) -> StoredBytes:
        """What one forward of so many blocks keeps, where each checkpoint has `numel` elements."""
        return self._store.num_bytes(math.ceil(num_blocks / self._layers_per_checkpoint), numel, itemsize)

    @torch.no_grad()
    def _put(self, place: Place, activation: Tensor) -> Checkpoint | Tensor:
        if not activation.numel():  # older versions of torch also save an empty tensor of their own
            return activation
        slot = place, activation.numel(), activation.dtype
        self._generations[slot] = generation = self._generations.get(slot, -1) + 1
        latest = self._latest()
        previous = latest if latest is not None and latest.place.number == place.number - 1 else None
        stored = self._store.put(place, activation)
        made = Checkpoint(place, stored, slot, generation, previous)
        self._latest = weakref.ref(made)
        return made

    @torch.no_grad()
    def _take(self, wanted: Checkpoint | Tensor) -> Tensor:
        """Called when autograd first needs the group: it runs again next, while the one before it is brought."""
        if isinstance(wanted, Tensor):
            return wanted
        if self._ahead is None or self._ahead[0] is not wanted:
            self._await_ahead()
            self._ahead = self._fetch(wanted)
        _, activation, arrival = self._ahead
        arrival.wait()
        self._ahead = self._fetch(wanted.previous) if wanted.previous is not None else None
        return activation

    def _fetch(self, wanted: Checkpoint) -> tuple[Checkpoint, Tensor, Handle]:
        if self._reuses_memory and wanted.generation != self._generations[wanted.slot]:
            raise ValueError(
                f"a later forward has overwritten checkpoint {wanted.place.number} before the backward that needs it; "
                "run each backward before the next forward, or set activations.defragment=false"
            )
        with self._stream.context():
            activation, arrival = self._store.take(wanted.place, wanted.stored)
        queued = self._stream.device_handle()
        return wanted, activation, Handle(arrival.wait, queued.wait)

    def _await_ahead(self) -> None:
        """Memory that something is on its way to must not be let go before it has come."""
        if self._ahead is not None:
            self._ahead[2].wait()
            self._ahead = None


def checkpointed_blocks(
    config: ActivationsConfig, replicas: Axis | None = None, device: torch.device | None = None
) -> CheckpointedBlocks | None:
    """How to run the blocks under these settings; None: as the model would.

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
    """Raises ConfigError where activations are to be partitioned and every rank's are its own."""
    if config.store == "partition" and replicas.size == 1:
        raise ConfigError(
            "activations.store=partition: no 2 tensor ranks hold the same activations, so there is nothing to "
            "partition; choose keep or partition_host, or set parallel.tensor_size above 1 and "
            "parallel.sequence_parallel=false, which divides activations by itself"
        )


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, of which only the arguments are kept for backward, where it runs again."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=True)
