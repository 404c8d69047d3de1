"""The search for a layout: closed forms say which ones are tried, dry runs what they take, and ties are resolved.

Of the layouts whose times differ by less than the error of the projection, the one with the most room wins.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gpt.settings.settings import Settings
from gpt.shape.flops import model_flops
from lab.dryrun.run_cost import RunCost
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import (
    DepthExtrapolation,
    Estimate,
    extrapolate,
    shallow_runs,
)
from lab.planner.layouts import FIELDS, CandidateLayout, Prediction, candidate_layouts, fits, predict, value_of
from parallel.validation.errors import ConfigError
from parallel.validation.fields import shown

MAX_DRY_RUNS = 3  # for each layout to verify, because some turn out not to fit
DEFAULT_TO_VERIFY = 3  # layouts
ASSUMED_ERROR = 0.1  # of projections on a cluster whose file states none


@dataclass(frozen=True)
class Plan:
    """The layouts that fit and those that do not, each with the memory and time that closed forms predict."""

    fitting: list[Prediction]  # the fastest layouts of each family, by each of RANKS; the fastest first
    too_large: list[Prediction]  # the layout with the least device memory of each partition in which none fits


class DoesNotFit(ConfigError):
    """No layout fits; `smallest` is the one with the least memory."""

    def __init__(self, smallest: Prediction, cluster: ClusterSpec, world_size: int):
        needed, usable, where = smallest.device_bytes / 1e9, cluster.usable_gpu_bytes / 1e9, ""
        if needed <= usable:
            needed, usable, where = smallest.host_bytes / 1e9, cluster.host_memory_gb, " of a node's host"
        super().__init__(
            f"the model does not fit on {world_size} GPUs: the layout with the least memory ({smallest.layout}) needs "
            f"{needed:.1f} GB of {usable:.1f}{where}, {needed - usable:.1f} too much"
        )
        self.smallest = smallest


def closed_form_rank(found: Prediction) -> tuple[float, int]:
    """Return the key by which layouts are sorted.

    Closed forms leave out that small products reach less of a GPU's rate, so of those that are equally fast, the one
    with the fewest micro-batches is the first.
    """
    return float(f"{found.seconds:.3g}"), found.num_micro_batches


def overlapped_rank(found: Prediction) -> tuple[float, int]:
    """Return the key by which layouts are sorted if computation hides the traffic of the data axis."""
    return float(f"{found.overlapped_seconds:.3g}"), found.num_micro_batches


RANKS = closed_form_rank, overlapped_rank


@dataclass(frozen=True)
class Search:
    """A run to plan on a cluster, whose layout keeps the values of the settings named in `fixed`.

    The folder `kept_runs`, if there is one, keeps dry runs.
    """

    settings: Settings
    cluster: ClusterSpec
    world_size: int
    fixed: tuple[str, ...] = ()
    num_to_verify: int = DEFAULT_TO_VERIFY
    kept_runs: Path | None = None

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.cluster.gpus_per_node

    def num_micro_batches(self, layout: CandidateLayout) -> int:
        num_ranks = self.world_size // layout.tensor_size // self.settings.parallel.context_size
        return self.settings.train.global_batch_size // (num_ranks * layout.micro_batch_size)

    def mfu(self, estimate: Estimate) -> float:
        """Return the part of the GPUs' peak rate that learning uses; recomputation does not count."""
        flops = model_flops(self.settings.model, self.settings.train.global_batch_size)
        return flops / self.world_size / estimate.seconds / (self.cluster.peak_half_tflops * 1e12)

    def cost(self, estimate: Estimate) -> RunCost:
        """Return what the whole run takes."""
        return RunCost.of(self.settings, estimate.seconds, self.world_size, self.cluster)

    def with_depth(self, num_layers: int) -> "Search":
        model = replace(self.settings.model, num_layers=num_layers)
        return replace(self, settings=replace(self.settings, model=model))

    def predict(self, layout: CandidateLayout) -> Prediction | None:
        return predict(layout, self.settings, self.cluster, self.world_size)

    def possible_layouts(self) -> list[Prediction]:
        """Return the predictions of all layouts that divide the world, the batch and the model."""
        layouts = candidate_layouts(self.cluster.gpus_per_node, self.settings, self.fixed)
        return [found for found in map(self.predict, layouts) if found is not None]

    def plan(self) -> Plan:
        """Return the plan by closed forms.

        Raise ConfigError if no layout divides the world and the batch, or keeps what is fixed; DoesNotFit if none fits.
        """
        possible = self.possible_layouts()
        if not possible:
            raise ConfigError(self._refusal())
        fitting = [found for found in possible if fits(found, self.cluster)]
        smallest: dict[tuple, Prediction] = {}
        for found in sorted(possible, key=lambda found: found.device_bytes):
            smallest.setdefault(found.layout.partition, found)
        if not fitting:
            raise DoesNotFit(next(iter(smallest.values())), self.cluster, self.world_size)
        fastest: dict[tuple, Prediction] = {}
        for rank in RANKS:
            for found in sorted(fitting, key=rank):
                fastest.setdefault((rank, found.layout.family), found)
        too_large = smallest.keys() - {found.layout.partition for found in fitting}
        chosen = sorted(dict.fromkeys(fastest.values()), key=closed_form_rank)
        return Plan(chosen, [smallest[one] for one in sorted(too_large)])

    def _refusal(self) -> str:
        """Return a message that names the fixed setting for which no layout is possible."""
        batch = self.settings.train.global_batch_size
        given = {name: f"{name}={shown(value_of(self.settings, name))}" for name in self.fixed}
        for name, own in given.items():
            others = replace(self, fixed=tuple(other for other in self.fixed if other != name)).possible_layouts()
            values = {getattr(found.layout, FIELDS[name]) for found in others}
            if values:
                choices = ", ".join(map(shown, sorted(values, key=lambda one: (one is None, one))))
                return (
                    f"{own} cannot be kept on {self.world_size} GPUs with train.global_batch_size={batch}; choose "
                    f"{choices}"
                )
        kept = f" with {', '.join(given.values())}" if given else ""
        return (
            f"no layout divides train.global_batch_size={batch} sequences over {self.world_size} ranks{kept}; choose a "
            f"multiple of {self.world_size}"
        )

    def deepest_models(self) -> list[tuple[int, CandidateLayout]]:
        """Return (number of layers that fit by closed forms, layout) for each family of layouts, the deepest first.

        A family is represented by the layout with the smallest micro-batch that divides the batch. Raise ConfigError if
        not even one layer fits.
        """
        self.with_depth(1).plan()
        smallest: dict[tuple, CandidateLayout] = {}
        for layout in (found.layout for found in self.possible_layouts()):
            smallest.setdefault(layout.family, layout)

        def max_layers(layout: CandidateLayout) -> int:
            def depth_fits(num_layers: int) -> bool:
                found = self.with_depth(num_layers).predict(layout)
                return found is not None and fits(found, self.cluster)

            return largest(depth_fits, 1)

        found = [(max_layers(layout), layout) for layout in smallest.values()]
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def estimate(self, layout: CandidateLayout) -> Estimate:
        """Return what dry runs say of a layout. Raise ConfigError as `dry_run` does."""
        return self.extrapolate(layout).at(self.settings.model.num_layers)

    def extrapolate(self, layout: CandidateLayout) -> DepthExtrapolation:
        """Return the extrapolation from two shallow dry runs with the layout."""
        return _extrapolated(self._in_world(layout), self.cluster, self.world_size, self.kept_runs)

    def _in_world(self, layout: CandidateLayout) -> Settings:
        in_world = replace(self.settings.dry_run, world_size=self.world_size)
        return layout.applied_to(replace(self.settings, dry_run=in_world))

    def fits(self, estimate: Estimate) -> bool:
        """Return True if the estimated memory fits a GPU and, with those of the node's other ranks, its host."""
        on_node = estimate.host_peak_bytes * self.cluster.gpus_per_node
        return self.cluster.holds(estimate.device_peak_bytes, on_node)

    def fitting(self, estimates: Mapping[CandidateLayout, Estimate]) -> dict[CandidateLayout, Estimate]:
        return {layout: found for layout, found in estimates.items() if self.fits(found)}

    def verify(self, plan: Plan) -> dict[CandidateLayout, Estimate]:
        """Estimate the first layouts of each order, until `num_to_verify` partitions have one that fits.

        One of each tensor size is estimated, too: closed forms leave out the small kernels that tensor parallelism does
        not divide. At most MAX_DRY_RUNS times `num_to_verify` are tried in an order.
        """
        verified: dict[CandidateLayout, Estimate] = {}
        for rank in RANKS:
            partitions: set[tuple] = set()  # of the layouts that fit
            tensor_sizes: set[int] = set()
            num_tried = 0
            for layout in (found.layout for found in sorted(plan.fitting, key=rank)):
                is_new = layout.partition not in partitions and len(partitions) < self.num_to_verify
                is_wanted = is_new or layout.tensor_size not in tensor_sizes
                if num_tried == MAX_DRY_RUNS * self.num_to_verify or not is_wanted:
                    continue
                num_tried += 1
                if layout not in verified:
                    show_progress(f"dry run {len(verified) + 1}: {layout}")
                    verified[layout] = self.estimate(layout)
                if self.fits(verified[layout]):
                    partitions.add(layout.partition)
                    tensor_sizes.add(layout.tensor_size)
        return verified

    @property
    def error(self) -> float:
        """The relative error within which projected times on the cluster are a tie."""
        return ASSUMED_ERROR if self.cluster.median_error is None else self.cluster.median_error

    def choose(self, fitting: Mapping[CandidateLayout, Estimate]) -> tuple[CandidateLayout, list[CandidateLayout]]:
        """Return the layout to use, and all those that tie with the fastest within the error, the fastest first.

        Of these it is the one with the most room, to a tenth of a GB, then with the fewest divided or offloaded states,
        then with the smallest tensor size.
        """
        by_time = sorted(fitting, key=lambda one: fitting[one].seconds)
        limit = (1 + self.error) * fitting[by_time[0]].seconds
        tied = [one for one in by_time if fitting[one].seconds <= limit]
        return min(tied, key=lambda one: (round(fitting[one].device_peak_bytes, -8), one.simplicity)), tied


@cache
def _extrapolated(
    settings: Settings, cluster: ClusterSpec, world_size: int, kept_runs: Path | None
) -> DepthExtrapolation:
    return extrapolate(shallow_runs(settings, kept_runs), cluster, settings.audit_share(world_size))


def largest(fits: Callable[[int], bool], first: int, step: int = 1) -> int:
    """Return the largest number first + n * step (n may be negative) that fits; 0 if none does.

    Assumes that every number below one that fits also fits. Strides away from `first` double until `low` fits and
    `high` does not; then bisection follows.
    """
    none = (first % step or step) - step  # the largest first + n * step that is not above 0: counts as fitting
    low, high, stride = first, first, step
    if fits(first):
        while fits(high := low + stride):
            low, stride = high, 2 * stride
    else:
        while (low := max(none, high - stride)) > none and not fits(low):
            high, stride = low, 2 * stride
    while high - low > step:
        middle = low + (high - low) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 0)


def show_progress(line: str) -> None:
    """Print a line to stderr, since a plan takes minutes; stdout has the plan alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
