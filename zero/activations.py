"""Activation checkpoints (ZeRO-R): a model's blocks run a few at a time, and only the input of each group is kept.

    forward    input -> put                       group -> the next group's input
    backward   take -> the group runs again, with the same dropout -> its gradients

Where an input waits in between is a store's affair: a small class with the two verbs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from parallel.errors import ConfigError
from parallel.ledger import Kind, tagged


@dataclass(frozen=True)
class ActivationsConfig:
    """Which activations a training step keeps between forward and backward."""

    store: Literal["none", "keep"] = "none"
    """none: no checkpoints, every activation is kept; keep: the checkpoints stay where they are."""
    layers_per_checkpoint: int = 1
    """Blocks that run again together; the last group may be smaller."""

    def __post_init__(self) -> None:
        if self.store != "none" and self.store not in STORES:
            raise ConfigError(f"activations.store={self.store} is unknown; choose none or {' or '.join(STORES)}")
        if self.layers_per_checkpoint < 1:
            raise ConfigError(
                f"activations.layers_per_checkpoint={self.layers_per_checkpoint} is below 1; choose 1 or more, "
                "or activations.store=none for no checkpoints"
            )


class ActivationStore(Protocol):
    def put(self, activation: Tensor) -> Any:
        """Called in forward with a group's input; returns what to remember it by."""

    def take(self, stored: Any) -> Tensor:
        """Called once in backward with what `put` returned; returns the same values."""


class KeepStore:
    """Keeps the input itself."""

    def put(self, activation: Tensor) -> Tensor:
        return tagged(Kind.CHECKPOINTS, activation)

    def take(self, stored: Tensor) -> Tensor:
        return stored


STORES = {"keep": KeepStore}


@dataclass(frozen=True)
class CheckpointedBlocks:
    """Runs a model's blocks, each a function of one tensor, under one checkpoint a group."""

    store: ActivationStore
    layers_per_checkpoint: int

    def __call__(self, blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        for first in range(0, len(blocks), self.layers_per_checkpoint):
            group = partial(_run, blocks[first : first + self.layers_per_checkpoint])
            # Inside, checkpoint's own hooks are the innermost: the store sees only what the checkpoint itself keeps, x
            # (and, in older versions of torch, an empty tensor).
            with saved_tensors_hooks(self.store.put, self.store.take):
                x = checkpoint(group, x, use_reentrant=False, preserve_rng_state=True)
        return x


def _run(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed_blocks(config: ActivationsConfig) -> CheckpointedBlocks | None:
    """How to run the blocks under these settings; None: as the model would."""
    if config.store == "none":
        return None
    return CheckpointedBlocks(STORES[config.store](), config.layers_per_checkpoint)
