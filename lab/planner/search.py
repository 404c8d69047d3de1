"""The search for a layout: closed forms say which ones are tried, dry runs what they take, and ties are resolved.

Of the layouts whose times differ by less than the error of the projection, the simplest one wins.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpt.settings.settings import Settings
from gpt.shape.flops import model_flops
from lab.measure.cluster import ClusterSpec
from lab.planner.closed_forms import RANKS, DoesNotFit, Plan, closed_form_rank, make_plan
from lab.planner.depth import (
    DepthExtrapolation,
    Estimate,
    extrapolate,
    planned_estimate,
    planned_settings,
    shallow_runs,
)
from lab.planner.layouts import CandidateLayout
from lab.planner.remedies import remedies
from parallel.errors import ConfigError

MAX_DRY_RUNS = 3  # for each layout to verify, because some turn out not to fit
DEFAULT_TO_VERIFY = 3  # layouts
MAX_REMEDIES = 6  # that are confirmed by dry runs
ASSUMED_ERROR = 0.1  # of projections on a cluster whose file states none
EstimateLayout = Callable[[CandidateLayout], Estimate]


def estimate_fits(estimate: Estimate, cluster: ClusterSpec) -> bool:
    """Return True if the estimated memory fits a GPU and, with those of the node's other ranks, its host."""
    return cluster.holds(estimate.device_peak_bytes, estimate.host_peak_bytes * cluster.gpus_per_node)


@dataclass(frozen=True)
class Search:
    """A run to plan on a cluster, whose layout keeps the values of the settings named in `fixed`."""

    settings: Settings
    cluster: ClusterSpec
    num_nodes: int
    fixed: tuple[str, ...] = ()
    num_to_verify: int = DEFAULT_TO_VERIFY

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.cluster.gpus_per_node

    def num_micro_batches(self, layout: CandidateLayout) -> int:
        num_ranks = self.world_size // layout.tensor_size // self.settings.parallel.context_size
        return self.settings.train.global_batch_size // (num_ranks * layout.micro_batch_size)

    def mfu(self, estimate: Estimate) -> float:
        """Return the part of the GPUs' peak rate that learning uses; recomputation does not count."""
        flops = model_flops(self.settings.model, self.settings.train.global_batch_size)
        return flops / self.world_size / estimate.seconds / (self.cluster.peak_half_tflops * 1e12)

    def plan(self) -> Plan:
        """Return the plan. Raise ConfigError as `make_plan` does, with what makes a layout fit if none does."""
        try:
            return make_plan(self.settings, self.cluster, self.world_size, self.fixed)
        except DoesNotFit as error:
            raise ConfigError(f"{error}; {self.verified_remedies(error.smallest.layout)}") from error

    def verified_remedies(self, layout: CandidateLayout) -> str:
        """Return, in words, what makes a layout fit in a dry run."""
        found = []
        for remedy in remedies(layout, self.settings, self.cluster, self.num_nodes)[:MAX_REMEDIES]:
            show_progress(f"dry run with {remedy}")
            changed = replace(self, settings=remedy.settings, num_nodes=remedy.num_nodes)
            try:
                estimate = changed.estimate(CandidateLayout.of(remedy.settings))
            except ConfigError:
                continue
            if estimate_fits(estimate, self.cluster):
                found.append(f"{remedy} ({estimate.device_peak_bytes / 1e9:.1f} GB)")
        return f"it fits with {', or with '.join(found)}" if found else "use a smaller model"

    def estimate(self, layout: CandidateLayout) -> Estimate:
        """Return what dry runs say of a layout. Raise ConfigError as `dry_run` does."""
        return estimate_layout(layout, self.settings, self.cluster, self.world_size)

    def settings_of(self, layout: CandidateLayout, estimate: Estimate) -> Settings:
        """Return the settings of the run that was estimated."""
        settings = layout.applied_to(self.settings)
        return planned_settings(settings, self.cluster, estimate.budget_gb) if estimate.budget_gb else settings


def estimate_layout(
    layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, world_size: int, folder: Path | None = None
) -> Estimate:
    """Return what dry runs say of a layout; `folder`, if there is one, keeps them, but for those of plans."""
    if layout.store == "planned":
        chosen = layout.applied_to(_in_world(settings, world_size))
        return planned_estimate(chosen, cluster, chosen.audit_share(world_size))
    return extrapolate_layout(layout, settings, cluster, world_size, folder).at(settings.model.num_layers)


def extrapolate_layout(
    layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, world_size: int, folder: Path | None = None
) -> DepthExtrapolation:
    """Return the extrapolation from two shallow dry runs with the layout; `folder`, if there is one, keeps them."""
    settings = layout.applied_to(_in_world(settings, world_size))
    return extrapolate(shallow_runs(settings, folder), cluster, settings.audit_share(world_size))


def _in_world(settings: Settings, world_size: int) -> Settings:
    return replace(settings, dry_run=replace(settings.dry_run, world_size=world_size))


def verify(
    plan: Plan, estimate_layout: EstimateLayout, cluster: ClusterSpec, num_to_verify: int
) -> dict[CandidateLayout, Estimate]:
    """Estimate the first layouts of each order, until `num_to_verify` partitions have one that fits.

    One of each tensor size is estimated, too: closed forms leave out the small kernels that tensor parallelism does not
    divide. At most MAX_DRY_RUNS times `num_to_verify` are tried in an order.
    """
    verified: dict[CandidateLayout, Estimate] = {}
    for rank in RANKS:
        partitions: set[tuple] = set()  # of the layouts that fit
        tensor_sizes: set[int] = set()
        num_tried = 0
        for layout in (found.layout for found in sorted(plan.fitting, key=rank)):
            is_new = layout.partition not in partitions and len(partitions) < num_to_verify
            if num_tried == MAX_DRY_RUNS * num_to_verify or not (is_new or layout.tensor_size not in tensor_sizes):
                continue
            num_tried += 1
            if layout not in verified:
                show_progress(f"dry run {len(verified) + 1}: {layout}")
                verified[layout] = estimate_layout(layout)
            if estimate_fits(verified[layout], cluster):
                partitions.add(layout.partition)
                tensor_sizes.add(layout.tensor_size)
    return verified


def show_progress(line: str) -> None:
    """Print a line to stderr, since a plan takes minutes; stdout has the plan alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def choose(fitting: Mapping[CandidateLayout, Estimate], error: float) -> tuple[CandidateLayout, list[CandidateLayout]]:
    """Return the layout to use, and all those that tie with the fastest within the error, the fastest first.

    Of these it is the one with the fewest divided or offloaded states, then with the smallest tensor size, then with
    the most room.
    """
    fastest = min(found.seconds for found in fitting.values())
    tied = sorted(
        (one for one, found in fitting.items() if found.seconds <= (1 + error) * fastest),
        key=lambda one: fitting[one].seconds,
    )
    return min(tied, key=lambda one: (one.simplicity, fitting[one].device_peak_bytes)), tied


def error_of(cluster: ClusterSpec) -> float:
    """Return the relative error within which projected times on the cluster are a tie."""
    return ASSUMED_ERROR if cluster.median_error is None else cluster.median_error


def verify_simpler(plan: Plan, verified: dict[CandidateLayout, Estimate], search: Search) -> None:
    """Estimate layouts that are simpler than the one to use and may tie, until one of them does.

    Those may tie whose lower bound, by closed forms, is within the error of the lowest one.
    """
    error = error_of(search.cluster)
    fastest = min(found.overlapped_seconds for found in plan.fitting)
    for found in sorted(plan.fitting, key=lambda one: (one.layout.simplicity, *closed_form_rank(one))):
        fitting = {one: estimate for one, estimate in verified.items() if estimate_fits(estimate, search.cluster)}
        if not fitting or found.layout.simplicity >= choose(fitting, error)[0].simplicity:
            return
        is_tried = any(one.simplicity == found.layout.simplicity for one in verified)
        if not is_tried and found.overlapped_seconds <= (1 + error) * fastest:
            show_progress(f"dry run {len(verified) + 1}, of a simpler layout: {found.layout}")
            verified[found.layout] = search.estimate(found.layout)
