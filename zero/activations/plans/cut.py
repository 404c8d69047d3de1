"""A joint graph cut by a plan into a graph of the forward and one of the backward.

    forward     inputs -> outputs, what is held for backward
    backward    what is held, inputs and outputs, gradients of the outputs -> gradients of the inputs

A kernel is computed again right before the first backward kernel that reads it. What is held comes as a list from which
the backward takes each tensor right before its first use, so that memory is freed as soon as in eager mode.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zero.activations.plans.joint import JointGraph, ancestors, is_backward, is_random, kernel_of, tensors_of

Nodes = frozenset[fx.Node]


class Held(NamedTuple):
    """A part of what forward leaves: the tensor of a node, or the state of the generator from which it drew."""

    node: fx.Node
    is_state: bool


@dataclass(frozen=True, eq=False)
class Cut:
    """The two graphs of a plan."""

    joint: JointGraph
    forward: fx.Graph
    backward: fx.Graph
    held: list[Held]  # in the order in which backward takes them
    inputs_read: list[int]  # numbers of the inputs that backward reads as they are, ..
    outputs_read: list[int]  # .. and of the outputs
    recomputed: list[fx.Node]  # the forward nodes that backward computes again


def cut(joint: JointGraph, kept: Nodes, stored: Nodes = frozenset()) -> Cut:
    """Return the graphs that compute all candidates but `kept` again; inputs in `stored` are held like other tensors.

    Other inputs, and outputs, come from autograd: an output that is held would refer to the node that holds it.
    """
    from_autograd = (kept & set(joint.outputs)) | (set(joint.inputs) - stored)
    wanted = [node for node in joint.gradients if node is not None]
    from_autograd &= ancestors(wanted, kept | set(joint.inputs))
    backward = _Backward(joint, (kept | stored) - from_autograd, from_autograd, wanted)
    graph = backward.build()
    return Cut(
        joint,
        _forward(joint, backward.held),
        graph,
        backward.held,
        [number for number, node in enumerate(joint.inputs) if node in from_autograd],
        [number for number, node in enumerate(joint.outputs) if node in from_autograd],
        backward.recomputed,
    )


def _forward(joint: JointGraph, held: list[Held]) -> fx.Graph:
    """Return the graph of inputs -> outputs and `held`, the first one last: backward takes from the end of a list."""
    graph, copies, states = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    needed = ancestors([*joint.outputs, *(node for node, _ in held)]) | set(joint.inputs)
    drawn = {node for node, is_state in held if is_state}
    for node in joint.nodes:
        if node in needed:
            if node in drawn:
                states[node] = graph.call_function(random_state, (next(tensors_of(node)).device,))
            copies[node] = graph.node_copy(node, copies.__getitem__)
    found = [(states if is_state else copies)[node] for node, is_state in reversed(held)]
    graph.output((*(copies[node] for node in joint.outputs), *found))
    return graph


class _Backward:
    """A graph of the backward that is being built."""

    def __init__(self, joint: JointGraph, kept: Nodes, from_autograd: Nodes, wanted: list[fx.Node]):
        self._joint, self._kept, self._graph = joint, kept, fx.Graph()
        self._wanted, self._needed = wanted, ancestors(wanted, kept | from_autograd)
        self._list = self._graph.placeholder("held")
        self.held: list[Held] = []
        self.recomputed: list[fx.Node] = []
        first = [node for node in (*joint.inputs, *joint.outputs) if node in from_autograd]
        self._copies = {node: self._placeholder(node) for node in dict.fromkeys([*first, *joint.tangents])}

    def build(self) -> fx.Graph:
        """Return the graph of all gradients."""
        for node in self._joint.nodes:
            if node in self._needed and is_backward(node):
                self._append_with_sources(node)
        for node in self._wanted:  # for a gradient that needs no kernel of backward
            self._append_with_sources(node)
        self._graph.output(tuple(node and self._copies[node] for node in self._joint.gradients))
        return self._graph

    def _placeholder(self, node: fx.Node) -> fx.Node:
        placeholder = self._graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
        return placeholder

    def _append_with_sources(self, wanted: fx.Node) -> None:
        """Append a node after all that it is computed from, as far as they are not there yet."""
        remaining = [wanted]  # not by recursion: a chain may be longer than Python's stack
        while remaining:
            node = remaining[-1]
            sources = [] if node in self._kept else node.all_input_nodes
            if node in self._copies or all(source in self._copies for source in sources):
                remaining.pop()
                if node not in self._copies:
                    self._copies[node] = self._append(node)
                    # At once: else the tuple would keep all of its tensors until the last one is read.
                    remaining += [
                        part for part in node.users if part.target is operator.getitem and part in self._needed
                    ]
            else:
                remaining += [source for source in reversed(sources) if source not in self._copies]

    def _append(self, node: fx.Node) -> fx.Node:
        if node in self._kept:
            return self._take(Held(node, is_state=False))
        if not is_backward(node):
            self.recomputed.append(node)
            if is_random(node):
                state = self._take(Held(node, is_state=True))
                args, kwargs = fx.map_arg((node.args, node.kwargs), self._copies.__getitem__)
                operation: Any = node.target
                replay = replay_of(operation, next(tensors_of(node)).device)
                again = self._graph.call_function(replay, (state, *args), kwargs)
                again.meta = node.meta | {"source": kernel_of(node)}
                return again
        return self._graph.node_copy(node, self._copies.__getitem__)

    def _take(self, held: Held) -> fx.Node:
        self.held.append(held)
        taken = self._graph.call_method("pop", (self._list,))
        taken.meta = {} if held.is_state else dict(held.node.meta)
        return taken


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that draws for a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def replay_of(operation: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function that returns what a random operation returned at a state of its device's generator."""

    def replay(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = random_state(device)
        _set_random_state(device, state)
        try:
            return operation(*args, **kwargs)
        finally:
            _set_random_state(device, before)

    return replay


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
