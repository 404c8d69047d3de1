"""Modules that run by a plan of their activations: their forward is replaced by that of `execution.py`."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.activations.choice import Hardware
from zero.activations.plans.costs import CostModel
from zero.activations.plans.cut import Line
from zero.activations.plans.execution import PlannedForward, Program, Traces
from zero.activations.plans.joint import JointGraph
from zero.activations.plans.planner import BlockPlan, Plan, Planner
from zero.activations.stores import STORES, ActivationStore, StoreName, make_store
from zero.memory.streams import SideStream

logger = logging.getLogger(__name__)


class PlannedBlocks:
    """Equal blocks that run one after another by plans for all of them within a budget.

    The first argument of each is the output of the block before. The plan is made when a block is first called, for
    each shape of its arguments; `plan` is the newest one. `replicas` are the ranks that hold the same activations.
    `stores` None: all that exist. On a CPU, whose memory is the host's, partition_host does not, unless it imitates a
    GPU.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        budget_gb: float,
        hardware: Hardware,
        device: torch.device,
        replicas: Axis,
        stores: tuple[StoreName, ...] | None = None,
    ):
        self.budget_gb, self._num_blocks = budget_gb, len(blocks)
        self._costs, self._stream = CostModel(hardware, replicas.size), SideStream(device)
        is_in_host_memory = device.type == "cpu" and replicas.imitated_backend != "nccl"
        missing = {"partition": replicas.size == 1, "partition_host": is_in_host_memory}
        self._possible_stores = stores or tuple(name for name in STORES if not missing.get(name))
        self._of_replicas, self._of_rank = (self._stores(axis, device) for axis in (replicas, replicas.without_peers()))
        self.plan: Plan | None = None
        self._planners: list[tuple[Planner, list[Program]]] = []
        traces = Traces(blocks[0], self._programs)
        for number, block in enumerate(blocks):
            block.forward = forward = PlannedForward(block, number, traces)
            forward.plans = self

    def change_budget(self, budget_gb: float) -> Plan:
        """Plan anew, between two steps, for the shapes that are known; return the newest plan."""
        self.budget_gb = budget_gb
        for planner, programs in self._planners:
            programs[:] = self._planned(planner)
        assert self.plan is not None, "no block has been called"
        return self.plan

    def _programs(self, joint: JointGraph, num_parameters: int) -> list[Program]:
        planner = Planner(joint, joint.inputs[num_parameters], self._costs, self._possible_stores)
        self._planners.append((planner, self._planned(planner)))
        return self._planners[-1][1]

    def _planned(self, planner: Planner) -> list[Program]:
        self.plan = plan = planner.plan(self._num_blocks, round(self.budget_gb * 1e9))
        logger.info("activations: %s", plan.describe())
        programs = {kind: self._program(kind) for kind in (plan.first, plan.second)}
        return [programs[plan.of_block(number)] for number in range(self._num_blocks)]

    def _stores(self, replicas: Axis, device: torch.device) -> dict[StoreName, ActivationStore | None]:
        """Return the stores of what all these ranks hold."""
        return {
            name: None if name == "keep" else make_store(name, replicas, device, self._stream, defragments=False)
            for name in STORES
        }

    def _program(self, plan: BlockPlan) -> Program:
        varying = plan.cut.joint.varying

        def store_of(held: Line) -> ActivationStore | None:
            stores = self._of_rank if held.node in varying else self._of_replicas
            return None if held.kind == "state" else stores[plan.placements[held.node]]

        return Program(plan.cut, [store_of(held) for held in plan.cut.held], self._stream)


def planned(
    module: nn.Module | Sequence[nn.Module],
    sample: Tensor | tuple,
    *,
    budget_gb: float,
    hardware: Hardware | None = None,
    replicas: Axis | None = None,
    stores: tuple[StoreName, ...] | None = None,
) -> PlannedBlocks:
    """Let a module, or equal ones that run one after another, keep activations by a plan; return it as `.plan`.

    At most `budget_gb` x 1e9 bytes are allocated from forward to backward on the device of the sample, which stands for
    the arguments of a call. Values and gradients keep their bits. Call this before ZeRO wraps the model. `hardware`:
    the rates by which times are compared; `replicas`: the ranks that hold the same activations; `stores`: where tensors
    may be kept, by default wherever it is possible. Raises ConfigError if no plan fits, with the least possible budget,
    or if torch cannot trace the module.
    """
    blocks = [module] if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList) else list(module)
    args = (sample,) if isinstance(sample, Tensor) else sample
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    replicas = replicas or Axis.trivial("tensor")
    codes = {_traced_code(block, args) for block in blocks} if len(blocks) > 1 else ()
    if len(codes) > 1:
        raise ConfigError(f"{len(blocks)} modules compute {len(codes)} different functions; plan equal ones together")
    result = PlannedBlocks(blocks, budget_gb, hardware or Hardware(), device, replicas, stores)
    forward: Any = blocks[0].forward
    with torch.enable_grad():
        forward.known(args, {})
    return result


def _traced_code(block: nn.Module, args: tuple) -> str:
    """Return the code of the joint graph of a module, without the names of its constants."""
    codes = list[str]()

    def keep(joint: JointGraph, _num_parameters: int) -> list[Program]:
        codes.append(joint.root.code)
        return []

    with torch.enable_grad():
        PlannedForward(block, 0, Traces(block, keep)).known(args, {})
    return codes[0]
