"""The kernels of compiled code, counted without a GPU, and put in the place of the eager ones in a log of kernels.

    region = compiled_region(build)                 the kernels of a function, eager and compiled
    kernels, places = splice(kernels, [region])     a log in which each call of the function is compiled
    observe_operations(CompiledCalls(...))          functions of `compiled_on_gpus` are compiled from the start

inductor's scheduler decides what is fused (lab/observe/inductor_internals.py). The log of a dry run is that of eager
code, in which `splice` finds the kernels of each call.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lab.observe.fake_tensors import QuickFakeTensorMode, instances_in
from lab.observe.kernel_log import Kernel, KernelLog, attention_of, product_of, recipe_of
from lab.observe.operation_observer import observe_operations
from parallel.torch_internals import real_tensors, schema_of, tree_leaves, tree_map

logger = logging.getLogger(__name__)

FORWARD, BACKWARD = "forward", "backward"
MOST_NAMES = 3  # of operations in the name of a fused kernel
NOT_NAMED = {"convert_element_type", "permute", "view", "reshape", "unbind", "expand", "unsqueeze", "add", "mul", "sub"}
# The kernels of a call may have others between them; a sequence that is further apart than this is not one call.
MOST_FOREIGN = 200
WORK = attrgetter("name", "num_bytes", "product", "dtype")  # of a kernel, in whatever phase it runs

# Makes a function, or a module, and its arguments, with the fake tensors of the mode in which it is called.
Build = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class CompiledRegion:
    """The kernels of a function's forward and backward, eager and compiled, {phase: kernels}."""

    eager: dict[str, list[Kernel]]
    compiled: dict[str, list[Kernel]]


def compiled_region(build: Build, build_eager: Build | None = None) -> CompiledRegion | None:
    """Return the kernels of a function that is compiled as a whole; None, with a warning, if they cannot be counted.

    Pass `build_eager` if the eager function is another one, which for example computes some rows at a time. A function
    without an argument or parameter that requires a gradient has no backward.
    """
    try:
        return CompiledRegion(_eager_kernels(build_eager or build), _compiled_kernels(build))
    except Exception as error:  # whatever a new torch raises where its private parts have changed
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        logger.warning("compiled kernels cannot be counted, so eager ones are: torch %s, %s", torch.__version__, reason)
        return None


def splice(kernels: Sequence[Kernel], regions: Sequence[CompiledRegion]) -> tuple[list[Kernel], list[int]]:
    """Return the kernels with the eager ones of the regions replaced, and the new place of every old place in the log.

    What runs between the kernels of a call, such as the reduction of gradients in a backward, comes after it: compiled
    code returns all of its results at once.
    """
    calls = [(eager, region.compiled[phase]) for region in regions for phase, eager in region.eager.items()]
    spliced: list[Kernel] = []
    places: list[int] = []
    position = 0
    while position < len(kernels):
        own, replacement = [position], [kernels[position]]
        for eager, compiled in calls:
            if found := _places_of(eager, kernels, position):
                own, replacement = found, [replace(kernel, phase=kernels[position].phase) for kernel in compiled]
                break
        places.append(len(spliced))
        spliced += replacement
        for place in range(position + 1, own[-1] + 1):
            places.append(len(spliced))
            if place not in own:
                spliced.append(kernels[place])
        position = own[-1] + 1
    return spliced, [*places, len(spliced)]


class CompiledCalls:
    """A compiler for dry runs that imitate GPUs (`zero.updates.compiled.ImitatedCompiler`).

    Compiled functions write their results in place, so that tensors without values need no operation. While `log` is a
    log, their kernels are added to it. One plan serves tensors of equal types: the bytes of its kernels are in
    proportion to the elements of the first one.
    """

    def __init__(self, is_on_host: Callable[[Tensor], bool]):
        self.log: KernelLog | None = None
        self._is_on_host = is_on_host
        self._planned: dict[Any, tuple[int, CompiledRegion | None]] = {}  # {types of a call: (elements, plan)}

    def compiles(self, tensor: Tensor) -> bool:
        return not self._is_on_host(tensor)

    def run_compiled(self, function: Callable[..., None], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        kinds = [(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(args)]
        key = function, tuple(constants.items()), tuple(kinds)
        if key not in self._planned:
            region = None
            with real_tensors():
                region = compiled_region(lambda: (partial(function, **constants), tree_map(_empty_like, tuple(args))))
            self._planned[key] = args[0].numel(), region
        numel, region = self._planned[key]
        if region is None:
            function(*args, **constants)
        elif self.log is not None:
            kernels = region.compiled[FORWARD]
            scale = args[0].numel() / numel
            self.log.extend(replace(kernel, num_bytes=round(kernel.num_bytes * scale)) for kernel in kernels)

    def on_operation(self, *_operation: Any) -> None: ...


def _empty_like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def _places_of(wanted: Sequence[Kernel], kernels: Sequence[Kernel], start: int) -> list[int]:
    """Return the places of `wanted` in the log, in order from `start`; an empty list if they do not begin there."""
    own: list[int] = []
    if wanted and WORK(kernels[start]) == WORK(wanted[0]):
        for place in range(start, min(len(kernels), start + len(wanted) + MOST_FOREIGN)):
            if WORK(kernels[place]) == WORK(wanted[len(own)]):
                own.append(place)
                if len(own) == len(wanted):
                    return own
    return []


def _eager_kernels(build: Build) -> dict[str, list[Kernel]]:
    log = KernelLog(lambda: "", is_on_host=lambda _tensor: False)
    with QuickFakeTensorMode():
        function, arguments = build()
        tensors = [*instances_in(arguments, Tensor), *_parameters(function).values()]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        with observe_operations(log):
            results = list(instances_in((function(*arguments),), Tensor))
            num_forward = log.count()
            if inputs:
                torch.autograd.grad(results, inputs, [torch.empty_like(result) for result in results])
    backward = {BACKWARD: log.kernels[num_forward:]} if inputs else {}
    return {FORWARD: log.kernels[:num_forward]} | backward


def _compiled_kernels(build: Build) -> dict[str, list[Kernel]]:
    # Here, because it imports torch's compiler, which takes seconds.
    from lab.observe import inductor_internals as inductor

    mode = inductor.FakeTensorMode()
    with mode:
        function, arguments = build()
        parameters = _parameters(function)

        def of_tensors(*tensors: Tensor) -> Any:
            given = iter(tensors)
            called_with = tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, tuple(arguments))
            if not isinstance(function, nn.Module):
                return function(*called_with)
            return torch.func.functional_call(function, {name: next(given) for name in parameters}, called_with)

        # Those inside of arguments, too: a tensor that is no input would be a constant, which cannot be a fake one.
        tensors = [*instances_in(arguments, Tensor), *parameters.values()]
        graphs = inductor.trace(of_tensors, tensors, mode)
    plans = {phase: inductor.plan(graph, mode, phase == BACKWARD) for phase, graph in graphs.items()}
    return {phase: [_kernel(node, inductor.operations_of(node)) for node in nodes] for phase, nodes in plans.items()}


def _parameters(function: Callable[..., Any]) -> dict[str, Tensor]:
    return dict(function.named_parameters()) if isinstance(function, nn.Module) else {}


def _kernel(node: Any, operations: Sequence[torch.fx.Node]) -> Kernel:
    """Return the kernel of a node of inductor's plan, which computes these operations."""
    names = [_name_of(operation.target) for operation in operations]
    results = [t for operation in operations for t in instances_in((operation.meta.get("val"),), Tensor)]
    num_bytes = node.get_read_write_buffers_sizes()  # a buffer that it reads twice counts once
    if node.is_extern() and names:
        inputs = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in operations[0].args]
        dtype = results[0].dtype if results else torch.float32
        kernel = Kernel(names[0], "", num_bytes, dtype, product_of(names[0], inputs))
        return replace(kernel, attention=attention_of(names[0], inputs), recipe=recipe_of(names[0], inputs))
    named = sorted({name for name in names if name not in NOT_NAMED} or set(names))
    dtype = results[-1].dtype if results else torch.float32
    return Kernel("compiled " + "+".join(named[:MOST_NAMES]), "", num_bytes, dtype)


def _name_of(operation: Any) -> str:
    return schema_of(operation).name.split("::")[1] if hasattr(operation, "namespace") else str(operation)
