"""A joint graph cut by a plan into a graph of the forward and one of the backward.

    forward     inputs -> outputs, what is held for backward
    backward    what is held, inputs and outputs, gradients of the outputs -> gradients of the inputs

A kernel is computed again right before the first backward kernel that reads it. What is held comes as a list from which
the backward takes each tensor right before its first use, so that memory is freed as soon as in eager mode. A planner
compares hundreds of plans by their lines; the graphs, which take much longer, are made of the plan that runs.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from zero.activations.plans.joint import JointGraph, ancestors, is_backward, is_random, tensors_of

Nodes = frozenset[fx.Node]


class Line(NamedTuple):
    """A line of a graph, with a node of the joint graph."""

    node: fx.Node
    kind: Literal["computed", "given", "held", "state"]
    """How the line comes by the node's result: by its kernel, from autograd, or from what forward has left. state: the
    line has the state of the generator before the node draws."""

    @property
    def reads(self) -> list[fx.Node]:
        """The nodes whose results the line reads."""
        return self.node.all_input_nodes if self.kind == "computed" else []


@dataclass(frozen=True, eq=False)
class Cut:
    """The two graphs of a plan: their lines, which costs are counted from, and the graphs, once they are asked for."""

    joint: JointGraph
    forward_lines: list[Line]
    backward_lines: list[Line]
    inputs_read: list[int]  # numbers of the inputs that backward reads as they are, ..
    outputs_read: list[int]  # .. and of the outputs

    @cached_property
    def held(self) -> list[Line]:
        """The lines by which backward takes what forward leaves, tensors and states of generators, in their order."""
        return _held(self.backward_lines)

    @cached_property
    def recomputed(self) -> list[fx.Node]:
        """The forward nodes that backward computes again."""
        return [node for node, kind in self.backward_lines if kind == "computed" and not is_backward(node)]

    @cached_property
    def forward(self) -> fx.Graph:
        """The graph of inputs -> outputs and `held`, the first one last: backward takes from the end of a list."""
        graph, copies, states = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        for node, kind in self.forward_lines:
            if kind == "state":
                states[node] = graph.call_function(random_state, (next(tensors_of(node)).device,))
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        found = [(states if kind == "state" else copies)[node] for node, kind in reversed(self.held)]
        graph.output((*(copies[node] for node in self.joint.outputs), *found))
        return graph

    @cached_property
    def backward(self) -> fx.Graph:
        """The graph of `held`, inputs and outputs, gradients of the outputs -> gradients of the inputs."""
        graph, copies, states = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        held = graph.placeholder("held")
        for node, kind in self.backward_lines:
            if kind == "state":
                states[node] = graph.call_method("pop", (held,))
            elif kind == "held":
                copies[node] = graph.call_method("pop", (held,))
            elif kind == "given":
                copies[node] = graph.placeholder(node.name)
            elif node in states:
                args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
                operation: Any = node.target
                replay = replay_of(operation, next(tensors_of(node)).device)
                copies[node] = graph.call_function(replay, (states[node], *args), kwargs)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(node and copies[node] for node in self.joint.gradients))
        return graph


def cut(joint: JointGraph, kept: Nodes, stored: Nodes = frozenset()) -> Cut:
    """Return the graphs that compute all candidates but `kept` again; inputs in `stored` are held like other tensors.

    Other inputs, and outputs, come from autograd: an output that is held would refer to the node that holds it.
    """
    from_autograd = (kept & set(joint.outputs)) | (set(joint.inputs) - stored)
    wanted = [node for node in joint.gradients if node is not None]
    from_autograd &= ancestors(wanted, kept | set(joint.inputs))
    backward = _backward_lines(joint, (kept | stored) - from_autograd, from_autograd, wanted)
    return Cut(
        joint,
        _forward_lines(joint, _held(backward)),
        backward,
        [number for number, node in enumerate(joint.inputs) if node in from_autograd],
        [number for number, node in enumerate(joint.outputs) if node in from_autograd],
    )


def _held(backward: list[Line]) -> list[Line]:
    return [line for line in backward if line.kind in ("held", "state")]


def _forward_lines(joint: JointGraph, held: list[Line]) -> list[Line]:
    """Return the lines that compute the outputs and what is held."""
    needed = ancestors([*joint.outputs, *(node for node, _ in held)]) | set(joint.inputs)
    drawn = {node for node, kind in held if kind == "state"}
    lines: list[Line] = []
    for node in joint.nodes:
        if node in drawn:
            lines.append(Line(node, "state"))
        if node in needed:
            lines.append(Line(node, "given" if node.op == "placeholder" else "computed"))
    return lines


def _backward_lines(joint: JointGraph, kept: Nodes, from_autograd: Nodes, wanted: list[fx.Node]) -> list[Line]:
    """Return the lines that compute all gradients, each right before the first one that reads it."""
    needed = ancestors(wanted, kept | from_autograd)
    first = [node for node in (*joint.inputs, *joint.outputs) if node in from_autograd]
    lines = [Line(node, "given") for node in dict.fromkeys([*first, *joint.tangents])]
    present = {line.node for line in lines}
    # Gradients that need no kernel of backward come last.
    remaining = [*reversed(wanted), *(node for node in reversed(joint.nodes) if node in needed and is_backward(node))]
    while remaining:  # not by recursion: a chain may be longer than Python's stack
        node = remaining.pop()
        if node in present:
            continue
        sources = [] if node in kept else node.all_input_nodes
        if missing := [source for source in sources if source not in present]:
            remaining += [node, *reversed(missing)]
            continue
        present.add(node)
        if node not in kept and is_random(node) and not is_backward(node):
            lines.append(Line(node, "state"))
        lines.append(Line(node, "held" if node in kept else "computed"))
        # At once: else the tuple would keep all of its tensors until the last one is read.
        remaining += [part for part in node.users if part.target is operator.getitem and part in needed]
    return lines


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
