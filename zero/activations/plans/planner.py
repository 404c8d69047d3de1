"""The choice of a plan: which candidates of a block are kept, computed again, divided or sent to the host.

Plans are compared by the bytes they hold, their peaks in forward and backward, and the time they add. Peaks are not
additive, so each plan is cut and its kernels are followed. If there are at most `MOST_PLANS` plans all are tried, and
of those that only keep and compute again; else the candidates are decided one after another, from the input to the
output, and the `BEAM` best plans go on, evenly spread over those that no other one beats in everything.

Two plans A and B for k and L - k blocks are enough: the first blocks hold less or the last ones peak less.

    forward   A A A B B    the last block of each kind peaks highest: what is held before it only grows
    backward  B B A A A
"""

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from torch import fx

from parallel.validation.errors import ConfigError
from zero.activations.plans.costs import CostModel, Footprint
from zero.activations.plans.cut import Cut, cut
from zero.activations.plans.joint import JointGraph, num_bytes, value_of
from zero.activations.stores import StoreName

MOST_PLANS, BEAM = 600, 16
Choice = StoreName | None  # None: computed again


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A plan for one block."""

    placements: dict[fx.Node, StoreName]  # of the tensors that are not computed again
    cut: Cut
    footprint: Footprint

    def describe(self) -> str:
        """Return what happens to each candidate, by the kernel that made it."""
        joint = self.cut.joint
        made = [node for choice in joint.choices for node in choice]
        names = {node: f"{node.name} {'x'.join(map(str, value_of(node).shape))}" for node in made}
        groups: dict[str, list[str]] = {}
        for node in joint.nodes:
            if node in names:
                groups.setdefault(self.placements.get(node, "recompute"), []).append(names[node])
        return "; ".join(f"{what} {', '.join(nodes)}" for what, nodes in groups.items())


@dataclass(frozen=True)
class Plan:
    """The plans of several equal blocks that run one after another: `first` for `num_first` of them, then `second`."""

    first: BlockPlan
    second: BlockPlan
    num_first: int
    num_blocks: int

    @cached_property
    def peak_bytes(self) -> int:
        """The bytes that the blocks allocate on the device at most, before backward has ended.

        The first input is counted if it is kept; gradients of parameters are counted until their block's backward ends.
        """
        before = peak = in_transit = 0
        for plan, count in ((self.first, self.num_first), (self.second, self.num_blocks - self.num_first)):
            if count:
                used = plan.footprint
                own = used.peak_of_last if plan is self.second else used.peak
                peak = max(peak, before + (count - 1) * used.kept + own)
                before += count * used.kept
                in_transit = max(in_transit, used.in_transit)
        return peak + in_transit

    @cached_property
    def seconds(self) -> float:
        """The time that the plan adds to a step."""
        others = self.num_blocks - self.num_first
        return self.num_first * self.first.footprint.seconds + others * self.second.footprint.seconds

    def describe(self) -> str:
        """Return the plans in one line."""
        second = f"; the others: {self.second.describe()}" if self.num_first < self.num_blocks else ""
        return (
            f"at most {self.peak_bytes / 1e9:.3f} GB, {self.seconds * 1e3:.3g} ms a micro-batch; "
            f"{self.num_first} of {self.num_blocks} blocks: {self.first.describe()}{second}"
        )

    def of_block(self, number: int) -> BlockPlan:
        """Return the plan of a block."""
        return self.first if number < self.num_first else self.second


def _spread(plans: list[BlockPlan]) -> list[BlockPlan]:
    """Return the best plan in each cost, and others evenly between the one that keeps least and the last one."""
    of_each_cost = zip(*(plan.footprint.costs for plan in plans), strict=True)
    best = [plans[costs.index(min(costs))] for costs in of_each_cost]
    return list(dict.fromkeys([*best, *plans[:: math.ceil(len(plans) / BEAM)]]))


class Planner:
    """The plans of blocks with one joint graph; `x` is the input that is the output of the block before."""

    def __init__(self, joint: JointGraph, x: fx.Node, costs: CostModel, stores: tuple[StoreName, ...] = ("keep",)):
        self._joint, self._x, self._costs = joint, x, costs
        self._stores = stores
        self._known: dict[tuple[Choice, ...], BlockPlan] = {}

    def plan(self, num_blocks: int, budget_bytes: float) -> Plan:
        """Return the plan that adds the least time, within a budget; all is kept if it fits.

        Raises ConfigError if there is none.
        """
        if all("keep" in options for options in self._options):
            everything = self._plan(tuple("keep" for _ in self._options))
            keeps_all = Plan(everything, everything, num_blocks, num_blocks)
            if keeps_all.peak_bytes <= budget_bytes:
                return keeps_all
        plans = list(self._pairs(num_blocks))
        fitting = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
        if not fitting:
            least = min(plan.peak_bytes for plan in plans)
            raise ConfigError(
                f"ActivationsConfig.budget_gb={budget_bytes / 1e9:.6g} is less than the least possible, "
                f"{math.ceil(least / 1e3) / 1e6:.6g}; allow that, or take smaller micro-batches"
            )
        return min(fitting, key=lambda plan: (plan.seconds, plan.peak_bytes))

    def _pairs(self, num_blocks: int) -> Iterator[Plan]:
        for first, second in product(self._best, repeat=2):
            if first is second:
                yield Plan(first, second, num_blocks, num_blocks)
            else:
                for num_first in range(1, num_blocks):
                    yield Plan(first, second, num_first, num_blocks)

    @cached_property
    def _options(self) -> list[tuple[Choice, ...]]:
        """The possibilities of the input, if a backward kernel reads it, and of the choices of the joint graph."""
        of_input = [self._possible((self._x,))] if self._x in self._joint.candidates else []
        return [*of_input, *((*self._possible(nodes), None) for nodes in self._joint.choices)]

    def _possible(self, nodes: tuple[fx.Node, ...]) -> tuple[StoreName, ...]:
        """Return where tensors may be kept: a store takes nothing small or with gaps, and divides what is equal."""
        first, *others = nodes
        if others or num_bytes(first) != value_of(first).nbytes:
            return ("keep",)
        if first not in self._joint.varying:
            return self._stores
        return tuple(store for store in self._stores if store != "partition") or ("keep",)

    @cached_property
    def _best(self) -> list[BlockPlan]:
        """The plans that no other one beats in everything."""
        without_stores: list[tuple[Choice, ...]] = [
            tuple(option for option in options if option in ("keep", None)) for options in self._options
        ]
        return self._undominated([*self._search(without_stores), *self._search(self._options)])

    def _search(self, possible: list[tuple[Choice, ...]]) -> list[BlockPlan]:
        """Return good plans of some possibilities of each choice."""
        if math.prod(map(len, possible)) <= MOST_PLANS:
            return [self._plan(choices) for choices in product(*possible)]
        beam: list[tuple[Choice, ...]] = [()]
        keep: tuple[Choice, ...] = tuple("keep" for _ in possible)
        for number, options in enumerate(possible):
            longer = [(*start, option) for start in beam for option in options]
            ends = {self._plan(start + keep[number + 1 :]): start for start in longer}
            beam = [ends[plan] for plan in _spread(self._undominated(ends))]
        return [self._plan(choices) for choices in beam]

    def _undominated(self, plans: Iterable[BlockPlan]) -> list[BlockPlan]:
        """Return the plans that no other one beats in everything, from the one that keeps least on."""
        found: list[BlockPlan] = []
        for plan in sorted(plans, key=lambda plan: plan.footprint.costs):
            if not any(all(map(operator.le, other.footprint.costs, plan.footprint.costs)) for other in found):
                found.append(plan)
        return found

    def _plan(self, choices: tuple[Choice, ...]) -> BlockPlan:
        if choices not in self._known:
            of_input = len(self._options) - len(self._joint.choices)
            groups = [(self._x,)][:of_input] + self._joint.choices
            placements = {
                node: choice
                for group, choice in zip(groups, choices, strict=True)
                for node in group
                if choice is not None
            }
            made = frozenset(placements) - set(self._joint.inputs)
            stored = frozenset(node for node, store in placements.items() if node is self._x and store != "keep")
            graphs = cut(self._joint, made, stored)
            self._known[choices] = BlockPlan(placements, graphs, self._costs.footprint(graphs, self._x, placements))
        return self._known[choices]
