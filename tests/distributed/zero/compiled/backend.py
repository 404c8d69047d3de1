"""A backend of torch.compile that counts what it gets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


class Backend:
    """A backend that runs the same kernels as without torch.compile, and counts the operations of each graph.

    The default partitioner keeps what backward reads, as plain torch does. The one of `aot_eager` computes some of it
    again, as inductor does; the first use of it takes seconds.
    """

    def __init__(self, name: str = "aot_eager_default_partitioner") -> None:
        torch.compiler.reset()
        self.name = name
        self.num_operations: list[int] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.num_operations.append(sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)

    def compile_blocks(self, module: nn.Module) -> None:
        for submodule in module.modules():
            if isinstance(submodule, nn.ModuleList):
                for block in submodule:
                    block.compile(backend=self)
