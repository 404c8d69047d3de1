"""The forward and the backward of a module as one graph of kernels, traced once for each shape of its inputs.

    inputs -> forward nodes -> outputs          a forward node that a backward node reads is a candidate: a plan keeps
    outputs' gradients ─┐       │               it, computes it again, or stores it elsewhere
    inputs' gradients <- backward nodes

AOTAutograd traces the joint graph on fake tensors with the kernels that eager mode runs. `cut.py` divides it into two
graphs by a plan, `execution.py` runs these inside an autograd function, and no kernel is decided upon while they run:
what is computed again is the same kernel on the same values, random ones with the generator's state of the first time.
A layer of the tensor axis is one node, with its collectives: what it returns is kept, or computed and sent again. That
differs between tensor ranks, or it has been summed over them and is equal on all of them.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from parallel.tensor.random_streams import RANK_OF_STREAM, random_stream_of
from parallel.tensor.traced_layers import Operations
from parallel.torch_internals import OpOverload, storage_id, tree_leaves

SMALL = 16  # candidates whose bytes are less than 1 / SMALL of the largest one are kept or computed again together


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A joint graph; its first inputs are those of the module, the others are gradients of the outputs.

    `varying_inputs` are the numbers of the inputs that differ between tensor ranks.
    """

    root: fx.GraphModule
    num_inputs: int
    varying_inputs: frozenset[int] = frozenset()

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """All nodes but the output."""
        nodes = [node for node in self.root.graph.nodes if node.op != "output"]
        for node in nodes:
            storages(node)  # once: copies of the node share the result
        return nodes

    @cached_property
    def _results(self) -> list[fx.Node | None]:
        (results,) = next(node for node in self.root.graph.nodes if node.op == "output").args
        return list(results)

    @property
    def outputs(self) -> list[fx.Node]:
        """The outputs of the module."""
        return [node for node in self._results[: -self.num_inputs] if node is not None]

    @property
    def gradients(self) -> list[fx.Node | None]:
        """The gradients of the inputs; None for one that needs none."""
        return self._results[-self.num_inputs :]

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the module."""
        return [node for node in self.nodes if node.op == "placeholder" and not is_backward(node)]

    @cached_property
    def tangents(self) -> list[fx.Node]:
        """The gradients of the outputs, which backward begins with."""
        return [node for node in self.nodes if node.op == "placeholder" and is_backward(node)]

    @cached_property
    def owners(self) -> dict[int, fx.Node]:
        """{storage: the first node whose result is a tensor in it}; later ones are views of it."""
        owners: dict[int, fx.Node] = {}
        for node in self.nodes:
            if isinstance(value_of(node), Tensor):
                owners.setdefault(storage_of(node), node)
        return owners

    def owner(self, node: fx.Node) -> fx.Node:
        """Return the node that made the memory of a node's tensor; the node itself if its result is no tensor."""
        return self.owners[storage_of(node)] if isinstance(value_of(node), Tensor) else node

    @cached_property
    def forward_nodes(self) -> list[fx.Node]:
        """The nodes that the outputs are computed from, in an order in which sums are the same on all ranks."""
        needed = ancestors(self.outputs)
        return [node for node in self.nodes if node in needed]

    @cached_property
    def varying(self) -> set[fx.Node]:
        """The nodes whose results differ between tensor ranks, which therefore cannot be divided over these."""
        found = {self.inputs[number] for number in self.varying_inputs}
        for node in self.nodes:
            is_reduced = "on_axis" in node.meta and node.meta["on_axis"].is_reduced
            if not is_reduced and (rank_of_stream(node) is not None or not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
        return found

    @cached_property
    def candidates(self) -> list[fx.Node]:
        """The forward nodes, among them inputs, with memory that a backward node reads, in the order of forward."""
        needed = ancestors([node for node in self.gradients if node is not None])
        backward = [node for node in needed if is_backward(node)]
        read = {self.owner(arg) for node in backward for arg in node.all_input_nodes if not is_backward(arg)}
        return [node for node in self.nodes if node in read and isinstance(value_of(node), Tensor)]

    @cached_property
    def choices(self) -> list[tuple[fx.Node, ...]]:
        """The candidates, without inputs, between which a plan chooses; small ones stand together."""
        made = [node for node in self.candidates if node not in self.inputs]
        largest = max((num_bytes(node) for node in made), default=0)
        small = tuple(node for node in made if num_bytes(node) * SMALL < largest)
        return [(node,) for node in made if node not in small] + ([small] if small else [])


def value_of(node: fx.Node) -> Any:
    """Return the fake tensor, or tensors, that a node results in."""
    return node.meta.get("val")


def storage_of(node: fx.Node) -> int:
    """Return the number of the storage of a node's tensor."""
    ((storage, _),) = storages(node)
    return storage


def num_bytes(node: fx.Node) -> int:
    """Return the bytes of the memory that a node's tensor is in."""
    ((_, size),) = storages(node)
    return size


def storages(node: fx.Node) -> tuple[tuple[int, int], ...]:
    """Return the number and the bytes of each storage that a node's result refers to, also of a node's copy."""
    if "storages" not in node.meta:
        found = (tensor.untyped_storage() for tensor in tensors_of(node))
        node.meta["storages"] = tuple({storage_id(storage): storage.nbytes() for storage in found}.items())
    return node.meta["storages"]


def is_backward(node: fx.Node) -> bool:
    """Return whether autograd runs a node in backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def kernel_of(node: fx.Node) -> Any:
    """Return the operation that torch has traced, which the target of the node stands for."""
    return node.meta.get("source", node.target)


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    kernel = kernel_of(node)
    return isinstance(kernel, OpOverload) and torch.Tag.nondeterministic_seeded in kernel.tags


def rank_of_stream(node: fx.Node) -> int | None:
    """Return the tensor rank from whose own random stream a node draws; None: it draws what all ranks do."""
    return node.meta.get("custom", {}).get(RANK_OF_STREAM) if is_random(node) else None


def resolve(root: fx.GraphModule, operations: Operations) -> None:
    """Let a graph run the layers of the tensor axis without torch's dispatcher, and draw from a rank's own stream."""
    for node in root.graph.nodes:
        rank, kernel = rank_of_stream(node), node.target
        if kernel in operations:
            node.meta |= {"source": kernel, "on_axis": operations[kernel]}
            node.target = operations[kernel].run
        elif rank is not None:
            node.meta["source"] = kernel
            node.target = _in_stream_of(rank, kernel)
    root.recompile()


def _in_stream_of(rank: int, operation: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        with random_stream_of(rank):
            return operation(*args, **kwargs)

    return draw


def is_view(node: fx.Node) -> bool:
    """Return whether all tensors of a node are in memory of its arguments, so that it costs nothing."""
    if node.target is operator.getitem:
        return True
    return set(storages(node)) <= {storage for arg in node.all_input_nodes for storage in storages(arg)}


def tensors_of(node: fx.Node) -> Iterator[Tensor]:
    """Yield the fake tensors of a node's result."""
    return (leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor))


def ancestors(nodes: Sequence[fx.Node], stops: frozenset[fx.Node] | set[fx.Node] = frozenset()) -> set[fx.Node]:
    """Return the nodes, and all that they are computed from, but not what a node of `stops` is computed from."""
    found: set[fx.Node] = set()
    remaining = list(nodes)
    while remaining:
        node = remaining.pop()
        if node not in found:
            found.add(node)
            if node not in stops:
                remaining += node.all_input_nodes
    return found
