"""A module's forward that runs the two graphs of a plan in the place of the module's code, if gradients are asked for.

    forward     inputs -> kernels -> outputs       held tensors -> put into the stores of the plan
    backward    held tensors taken from the stores -> kernels -> gradients of the inputs

The same kernels run on the same values as without a plan, so outputs and gradients have the same bits. Without
gradients the module's own code runs. Parameters are read from the module in each call: ZeRO may have replaced them.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from parallel.autograd_internals import keeps_graph, trace_joint_graph
from parallel.mesh import Work
from parallel.tensor.split_parameters import shared_dims, split_dims
from parallel.tensor.traced_layers import make_traceable
from parallel.torch_internals import tree_flatten, tree_unflatten
from parallel.validation.errors import ConfigError
from zero.activations.plans.cut import Cut
from zero.activations.plans.joint import JointGraph, resolve, value_of
from zero.activations.stores import ActivationStore, Slot
from zero.memory.streams import SideStream


class Program:
    """A plan that can be run: its graphs, and the store of each held tensor, None if the tensor is kept as it is."""

    def __init__(self, cut: Cut, stores: Sequence[ActivationStore | None], stream: SideStream):
        self.forward, self.backward = (fx.GraphModule(cut.joint.root, graph) for graph in (cut.forward, cut.backward))
        self.read = cut.inputs_read, cut.outputs_read
        self._stream = stream
        held = [value_of(node) if kind == "held" else None for node, kind in cut.held]
        self._stores = list(reversed(list(zip(stores, held, strict=True))))
        self.tangent_strides = [value_of(node).stride() for node in cut.joint.tangents]

    def put(self, tensors: Sequence[Any]) -> list[Any]:
        """Return what stands for the tensors that forward leaves, the first one last, until backward."""
        count = len(self._stores)
        return [
            tensor if store is None else store.put(Slot(number, count), tensor.as_strided((tensor.numel(),), (1,)))
            for number, ((store, _), tensor) in enumerate(zip(self._stores, tensors, strict=True))
        ]

    def take(self, stored: list[Any]) -> "list[Any] | Fetched":
        """Return an object with the `pop` of a list of the tensors; others begin to be fetched, in the order of use."""
        if not any(store for store, _ in self._stores):
            return stored
        found = []
        for number, ((store, like), item) in reversed(list(enumerate(zip(self._stores, stored, strict=True)))):
            if store is None:
                found.append((item, Work()))
                continue
            with self._stream.context():
                flat, collective = store.take(Slot(number, len(stored)), item)
            tensor = flat.as_strided(like.shape, like.stride())
            found.append((tensor, Work(collective.wait, self._stream.device_work().wait)))
        return Fetched(reversed(found))


class Fetched(list[tuple[Any, Work]]):
    """Tensors that are on their way, in a list whose `pop` waits for one of them."""

    def pop(self) -> Any:  # type: ignore[override]
        tensor, work = super().pop()
        work.wait()
        return tensor


class Run(torch.autograd.Function):
    """A call of a program."""

    @staticmethod
    def forward(ctx: Any, program: Program, num_outputs: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = program.forward(*inputs)
        outputs = results[:num_outputs]
        # Not by `save_for_backward`, which would keep all of it until the whole backward has run.
        ctx.held, ctx.program = program.put(results[num_outputs:]), program
        of_inputs, of_outputs = program.read
        ctx.save_for_backward(*(inputs[number] for number in of_inputs), *(outputs[number] for number in of_outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        program: Program = ctx.program
        read = ctx.saved_tensors  # raises if an earlier backward has freed them
        held = program.take(list(ctx.held))
        if not keeps_graph():
            ctx.held.clear()
        strided = (_strided(grad, strides) for grad, strides in zip(grads, program.tangent_strides, strict=True))
        return None, None, *program.backward(held, *read, *strided)


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with the strides that the graph was traced for, on which its views rely."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Known(NamedTuple):
    """The programs for calls with one kind of inputs."""

    programs: list[Program]  # of each block
    num_outputs: int
    output_spec: Any


class Traces:
    """The programs of equal modules by the kind of their inputs; the first module stands for all.

    `programs(joint, num_parameters)` returns a program for each module, from a graph whose first inputs are parameters
    and buffers.
    """

    def __init__(self, module: nn.Module, programs: Callable[[JointGraph, int], list[Program]]):
        # A copy, because ZeRO's hooks do not belong to the graph; its parameters are given to it when it is traced.
        shared = [value for part in module.modules() for name, value in vars(part).items() if not name.startswith("_")]
        memo: dict[int, Any] = {id(value): value for value in shared}  # such as groups of ranks
        memo |= {id(tensor): on_meta(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._module = copy.deepcopy(module, memo)
        self._programs = programs
        self.names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self._operations = make_traceable(self._module)
        divided = {*split_dims(module), *shared_dims(module)} if self._operations else set()
        self._varying = frozenset(number for number, name in enumerate(self.names) if name in divided)
        self.known: dict[Any, Known] = {}

    def add(self, key: Any, inputs: list[Tensor], leaves: list[Any], spec: Any, training: Sequence[bool]) -> None:
        """Make the programs for the calls with a key."""
        joint, output_spec = self.trace(inputs, leaves, spec, training)
        self.known[key] = Known(self._programs(joint, len(self.names)), len(joint.outputs), output_spec)

    def trace(
        self, inputs: list[Tensor], leaves: list[Any], spec: Any, training: Sequence[bool]
    ) -> tuple[JointGraph, Any]:
        """Return the joint graph for such arguments, and the form of the outputs. Raises ConfigError if it has none."""
        for module, is_training in zip(self._module.modules(), training, strict=True):
            module.training = is_training
        output_specs = []

        def function(*given: Tensor) -> tuple[Any, ...]:
            state, remaining = dict(zip(self.names, given, strict=False)), iter(given[len(self.names) :])
            rest = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(rest, spec)
            outputs, output_spec = tree_flatten(torch.func.functional_call(self._module, state, args, kwargs))
            output_specs.append((output_spec, len(outputs)))
            return tuple(outputs)

        name = type(self._module).__name__
        try:
            root = trace_joint_graph(function, inputs)
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigError(
                f"ActivationsConfig.store=planned: torch cannot trace {name}: {reason}; choose another store"
            ) from error
        resolve(root, self._operations)
        joint = JointGraph(root, len(inputs), self._varying)
        output_spec, num_outputs = output_specs[-1]
        if not len(joint.outputs) == len(joint.tangents) == num_outputs:
            raise ConfigError(
                f"ActivationsConfig.store=planned: {name} changes its buffers or inputs, or {num_outputs} outputs have "
                f"{len(joint.tangents)} gradients; choose another store"
            )
        return joint, output_spec


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor that stands for one in a copy of its module."""
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


class PlannedForward:
    """The forward of one of the modules of `traces` by its program; a copy of the module has its class's forward."""

    plans: Any = None  # the PlannedBlocks that the module is one of

    def __init__(self, module: nn.Module, number: int, traces: Traces):
        self._module, self._number, self._traces, self._eager = module, number, traces, module.forward
        self._modules = list(module.modules())
        paths = (name.rpartition(".") for name in traces.names)
        self._places = [(module.get_submodule(path), name) for path, _, name in paths]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns."""
        known, inputs = self.known(args, kwargs)
        if known is None:
            return self._eager(*args, **kwargs)
        outputs = Run.apply(known.programs[self._number], known.num_outputs, *inputs)
        return tree_unflatten(outputs, known.output_spec)

    def known(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Known | None, list[Tensor]]:
        """Return the programs for such arguments, which are made if necessary, and the inputs of their graphs.

        There are none without gradients.
        """
        state = [getattr(module, name) for module, name in self._places]
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [*state, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
            return None, inputs
        if torch.is_autocast_enabled(inputs[0].device.type):
            raise ConfigError(
                "ActivationsConfig.store=planned does not run under torch.autocast; cast the module instead"
            )
        training = tuple(module.training for module in self._modules)
        key = training, str(spec), *map(_kind, (*state, *leaves))
        known = self._traces.known
        if key not in known:
            self._traces.add(key, inputs, leaves, spec, training)
        return known[key], inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return partial(type(self._module).forward, memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # when this is called, the copy has no other forward yet


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Return what a graph depends on."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf
