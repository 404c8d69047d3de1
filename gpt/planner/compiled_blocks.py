"""The log of a dry run with the blocks compiled: inductor's kernels in the place of the eager ones."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from gpt.model.transformer import Block, ModelConfig
from gpt.settings import Settings
from parallel.instruments.comm_log import CommEvent
from parallel.instruments.compiled_kernels import CompiledRegion, compiled_region, splice
from parallel.instruments.kernel_log import Kernel
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens
from zero.activations.checkpointed_blocks import ActivationsConfig

logger = logging.getLogger(__name__)


def with_compiled_blocks(
    kernels: list[Kernel], events: list[CommEvent], settings: Settings, activations: ActivationsConfig
) -> tuple[list[Kernel], list[CommEvent]]:
    """Return the kernels of a step with those of each block compiled, and its collectives at their new places.

    Blocks whose compiled kernels cannot be counted stay eager, with a warning.
    """
    if settings.parallel.tensor_size > 1 or activations.store != "none":
        logger.warning("kernels of compiled blocks are counted eager with tensor parallelism or recomputation")
        return kernels, events
    one_layer = replace(settings.model, num_layers=1)
    region = block_region(one_layer, settings.train.micro_batch_size, settings.train.dtype)
    if region is None:
        return kernels, events
    kernels, places = splice(kernels, [region])
    moved = [
        replace(
            event,
            launched=places[int(event.launched)],
            awaited=places[int(event.awaited)],
            completed=places[int(event.completed)],
        )
        for event in events
    ]
    return kernels, moved


@cache
def block_region(config: ModelConfig, num_sequences: int, dtype: torch.dtype) -> CompiledRegion | None:
    """Return the kernels of one block, eager and compiled; None, with a warning, if they cannot be counted."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            block = Block(config, ReplicatedTokens(Axis.trivial("tensor")), nn.LayerNorm)
            x = torch.empty(num_sequences * config.seq_length, config.hidden_size, requires_grad=True)
        finally:
            torch.set_default_dtype(default_dtype)
        return block, (x, num_sequences)

    return compiled_region(build)
