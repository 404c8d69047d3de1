"""The private parts of torch that plan what inductor, torch's compiler, would run on a GPU, without one.

Nothing is generated or executed: autograd's graph of a function is traced on fake tensors, cut into forward and
backward, moved to an imitated GPU, lowered, and given to inductor's scheduler, which decides what is fused. No public
function returns this plan. It is a file of its own because the import takes seconds, and a training run does not need
it. tests/unit/lab/observe/test_compiled_kernels.py fails if a new torch behaves differently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._inductor.scheduler as inductor_scheduler
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config, ir
from torch._inductor.compile_fx import _recursive_joint_graph_passes as simplify_joint_graph
from torch._inductor.compile_fx import _recursive_post_grad_passes as simplify_graph
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensorMode", "operations_of", "plan", "trace"]

IMITATED = torch.device("cuda", 0)
# What inductor reads of a GPU to decide on the fusion and the splitting of loops: those of an H100.
PROPERTIES = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


def trace(
    function: Callable[..., Any], inputs: Sequence[Tensor], mode: FakeTensorMode
) -> dict[str, torch.fx.GraphModule]:
    """Return the graphs {"forward": ..., "backward": ...} of a function of the mode's tensors, as inductor cuts them.

    There is no backward if no input requires a gradient.
    """
    graphs: dict[str, torch.fx.GraphModule] = {}

    def keep(phase: str, graph: torch.fx.GraphModule, _inputs: Any) -> Callable:
        graphs[phase] = graph
        return make_boxed_func(graph.forward)

    def cut(joint: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        simplify_joint_graph(joint)
        return min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **options)

    traced = aot_function(
        function,
        fw_compiler=partial(keep, "forward"),
        bw_compiler=partial(keep, "backward"),
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    with V.set_fake_mode(mode):
        output = traced(*inputs)
        results = [output] if isinstance(output, Tensor) else output or []
        if any(result.requires_grad for result in results):
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    return graphs


def plan(graph: torch.fx.GraphModule, mode: FakeTensorMode, is_backward: bool) -> list[BaseSchedulerNode]:
    """Return the kernels that inductor would run on a GPU for a traced graph, in their order."""
    view_to_reshape(graph)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _moved(node.meta["val"], mode)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": IMITATED}
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with _imitated_gpu(), V.set_fake_mode(mode), torch.no_grad():
        simplify_graph(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            lowering._update_scheduler()
            nodes = [node for node in lowering.scheduler.nodes if not _names_a_result(node)]
            for node in nodes:
                node.get_read_write_buffers_sizes()  # cached in the node: later calls need none of these contexts
            return nodes


def _names_a_result(node: BaseSchedulerNode) -> bool:
    """Return True for a node that is no kernel: it only names a part of another one's result."""
    return isinstance(node, inductor_scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput)


def operations_of(node: BaseSchedulerNode) -> list[torch.fx.Node]:
    """Return the operations of the graph that a kernel computes; of a kernel of a library, that one operation."""
    origins = [origin for part in node.get_nodes() if part.node for origin in part.node.get_origins()]
    operations = [origin for origin in origins if origin.op == "call_function"]
    if not node.is_extern():
        return operations
    assert node.node is not None
    called = node.node.get_origin_node()
    target = called.target if called is not None else getattr(node.node, "op_overload", None)
    return [operation for operation in operations if operation.target is target][:1]


def _moved(value: Any, mode: FakeTensorMode) -> Any:
    """Return fake tensors on the imitated GPU for those in a node's metadata."""
    if isinstance(value, Tensor):
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(mode, meta, IMITATED)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, mode) for item in value)
    return value


@contextmanager
def _imitated_gpu() -> Iterator[None]:
    """Let inductor plan for a GPU although torch has none, and Triton, which generates code later, is not installed."""
    with (
        config.patch(force_disable_caches=True, max_autotune=False, max_autotune_gemm=False),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda _class, _device: PROPERTIES)),
        mock.patch.object(inductor_scheduler, "has_triton", return_value=True),
    ):
        yield
