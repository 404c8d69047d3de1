"""Plans beside the partition that inductor's activation_memory_budget makes of the same graph, by one cost model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition

from gpt.kernels.norms import NORMS
from gpt.model.transformer import Block, Sequences
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens
from zero.activations.choice import Hardware
from zero.activations.plans.costs import CostModel, peak_and_end
from zero.activations.plans.cut import Line
from zero.activations.plans.joint import storages
from zero.activations.plans.module import PlannedBlocks

CORE = Hardware(tflops=0.06, memory_gb_per_second=8.0)
CONFIG = ModelConfig(1, 192, num_heads=6, seq_length=128, vocab_size=97, dropout=0.0)  # a block of the quickstart
SEQUENCES, NUM_BLOCKS = 16, 12


def sizes(nodes: Any) -> dict[int, int]:
    return {storage: size for node in nodes if isinstance(node, fx.Node) for storage, size in storages(node)}


def inductors_graphs(block: nn.Module, x: Tensor, budget: float) -> list[fx.Graph]:
    """Return the graphs of forward and backward, of the kernels of eager mode."""
    names, params = zip(*block.named_parameters(), strict=True)
    graphs: list[fx.Graph] = []

    def keep(graph: fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        graphs.append(graph.graph)
        return graph

    def function(x: Tensor, *params: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, params, strict=True)), (x, Sequences(SEQUENCES)))

    with functorch_config.patch(activation_memory_budget=budget):
        traced = aot_function(function, keep, keep, partition_fn=min_cut_rematerialization_partition)
        traced(x, *params).sum().backward()
    return graphs


def lines_of(graph: fx.Graph) -> tuple[list[Line], list[fx.Node]]:
    """Return the lines of a graph, and the nodes that it returns."""
    *nodes, output = graph.nodes
    return [Line(node, "computed") for node in nodes], output.all_input_nodes


def peak_of_blocks(forward: fx.Graph, backward: fx.Graph, x_bytes: int) -> int:
    """Return the bytes that NUM_BLOCKS of them allocate, counted as a plan's: the inputs and the last output too."""
    (output, *_) = forward.output_node().args[0]
    inputs = backward.find_nodes(op="placeholder")
    tangents, given = ([node for node in inputs if node.name.startswith(name)] for name in ("tangents", "primals"))
    held = sizes(set(inputs) - {*tangents, *given})
    in_forward, _ = peak_and_end(*lines_of(forward), sizes(forward.find_nodes(op="placeholder")), {})
    in_backward, _ = peak_and_end(*lines_of(backward), sizes(given), held | sizes(tangents), sizes(tangents))
    last = max(in_forward, in_backward + sum(sizes([output]).values()))
    return NUM_BLOCKS * x_bytes + (NUM_BLOCKS - 1) * sum(held.values()) + last


def test_a_plan_adds_less_time_than_inductors_partition_that_needs_as_much_memory():
    block = Block(CONFIG, ReplicatedTokens(Axis.trivial("tensor")), NORMS[CONFIG.norm])
    x = torch.zeros(SEQUENCES * CONFIG.seq_length, CONFIG.hidden_size, requires_grad=True)
    costs = CostModel(CORE)

    def seconds(graphs: list[fx.Graph]) -> float:
        return sum(costs.kernel_seconds(node) for graph in graphs for node in graph.nodes)

    whole, *of_budgets = (inductors_graphs(block, x, budget) for budget in (1.0, 0.5, 0.2))
    plans = PlannedBlocks([block] * NUM_BLOCKS, 1e3, CORE, x.device, Axis.trivial("tensor"))
    block(x, Sequences(SEQUENCES))
    for graphs in of_budgets:
        peak, added = peak_of_blocks(*graphs, x.nbytes), NUM_BLOCKS * (seconds(graphs) - seconds(whole))
        assert 0 < plans.change_budget(peak / 1e9).seconds < added, f"{peak / 1e6:.1f} MB"
