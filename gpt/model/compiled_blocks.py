"""Blocks of a GPT whose forward is compiled by torch.compile; all of them share one graph, or two.

The module's `__call__` is not compiled: its hooks belong to ZeRO. Evaluation and generation, whose shapes differ from
training's, run the blocks as they are, and so does a step in which single operations are observed.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from gpt.model.transformer import GPT, Block, Sequences
from parallel.tensor.blocks import Recomputation, RunBlock, RunBlocks
from parallel.tensor.traced_layers import make_traceable
from parallel.torch_internals import activation_memory_budget, active_dispatch_modes
from parallel.validation.errors import ConfigError

Backend = str | Callable[..., Any]


def compile_blocks(
    model: GPT,
    recomputes: Recomputation,
    backend: Backend = "inductor",
    may_break: bool = False,
    options: dict[str, Any] | None = None,
    budget: float | None = None,
) -> None:
    """Compile what each block computes in training, as one graph, or two.

    If blocks are computed again in backward, the last product of each stays outside: inside a graph, it could not be
    left out there. Attention stays outside if a tensor rank draws random numbers of its own for its dropout, or if its
    heads are exchanged over a context: a graph ends before it and another begins after it. With `may_break`, graphs
    also end where something cannot be traced. `options` are those of the backend. With a `budget`, a graph saves that
    share of what it would save for backward beyond its inputs, and computes the rest again.
    """
    draws_apart = model.config.dropout > 0 and model.tokens.axis.size > 1
    attends_outside = draws_apart or model.tokens.context.size > 1
    make_traceable(model.blocks)
    if budget is not None:  # around all forwards: shapes that are new, such as the number of documents, make new graphs
        model.run_blocks = partial(_run_within, budget, model.run_blocks)

    def compiled(method: Callable[..., Any], block: Block) -> Callable[..., Any]:
        return torch.compile(MethodType(method, block), backend=backend, fullgraph=not may_break, options=options)

    for block in model.blocks:
        assert isinstance(block, Block)
        finish = block.finish if recomputes == "blocks" else None
        if attends_outside:
            before = compiled(_before_heads, block)
            after = compiled(_after_heads if finish else _after_heads_to_end, block)
            function: Callable[..., Any] = partial(_around_attention, block.attention.attend, before, after)
        else:
            function = compiled(Block.before_last_product if finish else Block.forward, block)
        block.forward = CompiledForward(block, function, finish)  # type: ignore[method-assign]


def _run_within(budget: float, run_blocks: RunBlocks, blocks: Sequence[RunBlock], x: Tensor) -> Tensor:
    with activation_memory_budget(budget):
        return run_blocks(blocks, x)


def _around_attention(
    attend: Callable[..., Tensor],
    before: Callable[..., Any],
    after: Callable[..., Any],
    x: Tensor,
    sequences: Sequences,
) -> Any:
    return after(x, attend(*before(x, sequences), documents=sequences.documents))


def _before_heads(block: Block, x: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
    return block.attention.split_heads(block.attention_norm(x), sequences)


def _after_heads(block: Block, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    return block.after_attention(x, block.attention.project(attended))


def _after_heads_to_end(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    return block.finish(*_after_heads(block, x, attended))


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if the compiler that inductor needs for the device is not installed."""
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError("train.compile=blocks needs triton on a GPU; pip install triton, or choose none")
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++")):
        raise ConfigError("train.compile=blocks needs a C++ compiler on a CPU; install g++, or choose none")


class CompiledForward:
    """A block's forward that runs compiled code in training; a copy of the block has the forward of its class."""

    def __init__(self, block: Block, compiled: Callable[..., Any], finish: Callable[..., Tensor] | None):
        """`finish`: what remains of the forward; None if `compiled` is all of it."""
        self._block, self._compiled, self._finish, self._eager = block, compiled, finish, block.forward

    def __call__(self, x: Tensor, sequences: Sequences) -> Tensor:
        if not self._block.training or active_dispatch_modes():
            return self._eager(x, sequences)
        output = self._compiled(x, sequences)
        return self._finish(*output) if self._finish else output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return MethodType(type(self._block).forward, memo[id(self._block)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._block, "forward")  # when this is called, the copy has no other forward yet
