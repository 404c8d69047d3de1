"""The bytes that inductor's kernels for a function read and write, without generating code or allocating tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode


def bytes_of_kernels(function: Callable[..., Any], *make_arguments: Callable[[], Tensor]) -> list[int]:
    """Return the bytes of each kernel; a buffer that a kernel uses several times counts once."""
    found: list[int] = []

    def lower(graph_module: fx.GraphModule, inputs: list[Tensor], **_: Any) -> fx.GraphModule:
        record_original_output_strides(graph_module)
        graph = GraphLowering(graph_module, shape_env=detect_fake_mode(inputs).shape_env)
        with V.set_debug_handler(DebugContext()), V.set_graph_handler(graph), V.set_real_inputs(inputs):
            graph.run(*inputs)
            graph._update_scheduler()
            found.extend(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes)
        return graph_module

    compiled = torch.compile(function, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=lower))
    with FakeTensorMode(), torch.no_grad():
        compiled(*(make() for make in make_arguments))
    return found
