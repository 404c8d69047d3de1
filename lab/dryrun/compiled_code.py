"""The log of a dry run with the blocks compiled: inductor's kernels in the place of the eager ones."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gpt.kernels.documents import Documents
from gpt.model.transformer import GPT, Sequences
from gpt.settings.settings import Settings
from gpt.settings.training import Fp8Settings
from gpt.shape.config import ModelConfig
from lab.observe.compiled_kernels import CompiledRegion, compiled_region, splice
from lab.observe.kernel_log import Kernel
from parallel.mesh import Axis
from parallel.tensor.blocks import RunBlock
from parallel.tensor.linear_cross_entropy import rows_of_chunks
from parallel.tensor.softmax import Softmax, log_sums_to_gradients_
from parallel.tensor.token_layout import ReplicatedTokens
from zero.activations.checkpointed_blocks import ActivationsConfig
from zero.fp8.kernels import HOPPER
from zero.fp8.layers import convert

logger = logging.getLogger(__name__)


def with_compiled_code(
    kernels: list[Kernel], settings: Settings, activations: ActivationsConfig
) -> tuple[list[Kernel], list[int]]:
    """Return the kernels of a step with those that a GPU runs compiled, and the new place of every old place.

    The loss is compiled on GPUs, and blocks if the settings say so. What cannot be counted stays eager, with a warning.
    """
    one_layer, train = replace(settings.model, num_layers=1), settings.train
    has_no_tensor_axis = settings.parallel.tensor_size == 1
    regions = []
    if has_no_tensor_axis and settings.dry_run.backend == "nccl":
        num_tokens = train.micro_batch_size * one_layer.seq_length
        softmax = Softmax(cap=one_layer.logit_cap, z_loss=train.z_loss)
        regions += [loss_region(one_layer, softmax, num_rows, train.dtype) for num_rows in rows_of_chunks(num_tokens)]
    if has_no_tensor_axis and train.compiles_blocks and activations.store == "none":
        kinds = [train.fp8, None] if train.matmul == "fp8" else [None]  # the first and last blocks may not be in FP8
        of_block = one_layer, train.micro_batch_size, train.dtype, settings.data.mask_documents
        regions += [block_region(*of_block, kind) for kind in kinds]
    elif train.compiles_blocks:
        logger.warning("kernels of compiled blocks are counted eager with tensor parallelism or recomputation")
    return splice(kernels, [region for region in regions if region is not None])


@cache
def loss_region(config: ModelConfig, softmax: Softmax, num_rows: int, dtype: torch.dtype) -> CompiledRegion | None:
    """Return the kernels of the softmax of a chunk of tokens, eager and compiled, as `block_region` does."""

    def build(is_eager: bool) -> tuple[Callable[..., Any], list[Tensor]]:
        logits = torch.empty(num_rows, config.padded_vocab_size, dtype=dtype)[:, : config.vocab_size]
        by_rows = partial(softmax.run, log_sums_to_gradients_)
        whole = partial(log_sums_to_gradients_, softmax)
        return by_rows if is_eager else whole, [logits, torch.empty(num_rows)]

    return compiled_region(partial(build, False), partial(build, True))


@cache
def block_region(
    config: ModelConfig, num_sequences: int, dtype: torch.dtype, masks_documents: bool, fp8: Fp8Settings | None
) -> CompiledRegion | None:
    """Return the kernels of one block, eager and compiled; None, with a warning, if they cannot be counted."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        calls: list[tuple[Tensor, Sequences]] = []

        def keep_call(blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
            (block,) = blocks
            assert isinstance(block, partial)
            calls.append((x.detach().requires_grad_(), block.keywords["sequences"]))
            return x

        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = GPT(config, ReplicatedTokens(Axis.trivial("tensor")), keep_call)
        finally:
            torch.set_default_dtype(default_dtype)
        ids = torch.zeros(num_sequences, config.seq_length, dtype=torch.int64)
        documents = Documents(ids, torch.empty(num_sequences + 1, dtype=torch.int32)) if masks_documents else None
        model.last_hidden(ids, documents)
        if fp8 is not None:
            convert(model.blocks, fp8.recipe, use_fast_accum=fp8.use_fast_accum, emulate=fp8.emulate, device=HOPPER)
        return model.blocks[0], calls[0]

    return compiled_region(build)
