"""Blocks of a GPT whose forward is compiled by torch.compile, one graph for all of them.

The module's `__call__` is not compiled: its hooks belong to ZeRO. Evaluation and generation, whose shapes differ from
training's, run the blocks as they are, and so does a step in which single operations are observed.
"""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from gpt.model.transformer import GPT, Block
from parallel.blocks import Recomputation
from parallel.errors import ConfigError
from parallel.tensor.traced_layers import make_traceable
from parallel.torch_internals import active_dispatch_modes

Backend = str | Callable[..., Any]


def compile_blocks(
    model: GPT, recomputes: Recomputation, backend: Backend = "inductor", may_break: bool = False
) -> None:
    """Compile what each block computes in training.

    If blocks are computed again in backward, the last product of each stays outside: inside a graph, it could not be
    left out there. Graphs end where a tensor rank draws random numbers of its own for dropout, and, with `may_break`,
    where anything else cannot be traced.
    """
    draws_apart = model.config.dropout > 0 and model.tokens.axis.size > 1
    make_traceable(model.blocks, model.tokens)
    for block in model.blocks:
        assert isinstance(block, Block)
        if draws_apart:
            block.attention.attend = torch.compiler.disable(block.attention.attend)  # type: ignore[method-assign]
            block.dropout.forward = torch.compiler.disable(block.dropout.forward)  # type: ignore[method-assign]
        function = block.before_last_product if recomputes == "blocks" else block.forward
        compiled = torch.compile(function, backend=backend, fullgraph=not (draws_apart or may_break))
        finish = block.finish if recomputes == "blocks" else None
        block.forward = CompiledForward(block, compiled, finish)  # type: ignore[method-assign]


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

    def __call__(self, x: Tensor, num_sequences: int) -> Tensor:
        if not self._block.training or active_dispatch_modes():
            return self._eager(x, num_sequences)
        output = self._compiled(x, num_sequences)
        return self._finish(*output) if self._finish else output

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return MethodType(type(self._block).forward, memo[id(self._block)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._block, "forward")  # when this is called, the copy has no other forward yet
