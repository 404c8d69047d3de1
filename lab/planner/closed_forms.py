"""All layouts of a run by closed forms: those that fit, the fastest first, and the deepest models that they allow."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.planner.layouts import FIELDS, CandidateLayout, Prediction, candidate_layouts, fits, predict, value_of
from parallel.errors import ConfigError
from parallel.fields import shown


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


def make_plan(settings: Settings, cluster: ClusterSpec, world_size: int, fixed: Collection[str] = ()) -> Plan:
    """Return the plan for a world, in which the settings named in `fixed` keep their values.

    Raise ConfigError if no layout divides the world and the batch, or keeps what is fixed; DoesNotFit if none fits.
    """
    possible = possible_layouts(settings, cluster, world_size, fixed)
    if not possible:
        raise ConfigError(_refusal(settings, cluster, world_size, fixed))
    fitting = [found for found in possible if fits(found, cluster)]
    if not fitting:
        raise DoesNotFit(min(possible, key=lambda found: found.device_bytes), cluster, world_size)
    fastest = dict.fromkeys(found for rank in RANKS for found in fastest_of_families(fitting, rank))
    partitions = {found.layout.partition for found in possible} - {found.layout.partition for found in fitting}
    too_large = [
        min((found for found in possible if found.layout.partition == one), key=lambda found: found.device_bytes)
        for one in sorted(partitions)
    ]
    return Plan(sorted(fastest, key=closed_form_rank), too_large)


def possible_layouts(
    settings: Settings, cluster: ClusterSpec, world_size: int, fixed: Collection[str]
) -> list[Prediction]:
    """Return the predictions of all layouts that divide the world, the batch and the model."""
    layouts = candidate_layouts(cluster.gpus_per_node, settings, fixed)
    predictions = (predict(layout, settings, cluster, world_size) for layout in layouts)
    return [found for found in predictions if found is not None]


def _refusal(settings: Settings, cluster: ClusterSpec, world_size: int, fixed: Collection[str]) -> str:
    """Return a message that names the fixed setting for which no layout is possible."""
    batch = settings.train.global_batch_size
    for name in fixed:
        others = possible_layouts(settings, cluster, world_size, set(fixed) - {name})
        values = {getattr(found.layout, FIELDS[name]) for found in others}
        if values:
            choices = ", ".join(map(shown, sorted(values, key=lambda one: (one is None, one))))
            return (
                f"{name}={shown(value_of(settings, name))} cannot be kept on {world_size} GPUs with "
                f"train.global_batch_size={batch}; choose {choices}"
            )
    kept = f" with {', '.join(f'{name}={shown(value_of(settings, name))}' for name in fixed)}" if fixed else ""
    return (
        f"no layout divides train.global_batch_size={batch} sequences over {world_size} ranks{kept}; choose a multiple "
        f"of {world_size}"
    )


def fastest_of_families(predictions: list[Prediction], rank: Callable[[Prediction], Any]) -> list[Prediction]:
    """Return the fastest layout of each family, the fastest family first."""
    fastest: dict[tuple, Prediction] = {}
    for found in sorted(predictions, key=rank):
        fastest.setdefault(found.layout.family, found)
    return list(fastest.values())


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


def deepest_models(
    settings: Settings, cluster: ClusterSpec, world_size: int, fixed: Collection[str] = ()
) -> list[tuple[int, CandidateLayout]]:
    """Return (number of layers that fit by closed forms, layout) for each family of layouts, the deepest first.

    A family is represented by the layout with the smallest micro-batch that divides the batch. Raise ConfigError if
    not even one layer fits.
    """

    def with_depth(num_layers: int) -> Settings:
        return replace(settings, model=replace(settings.model, num_layers=num_layers))

    make_plan(with_depth(1), cluster, world_size, fixed)
    smallest: dict[tuple, CandidateLayout] = {}
    for found_layout in possible_layouts(settings, cluster, world_size, fixed):
        if found_layout.layout.store != "planned":
            smallest.setdefault(found_layout.layout.family, found_layout.layout)
    if not smallest:
        raise ConfigError("activations.store=planned is a plan for one depth; choose another store with --largest")
    found = []
    for layout in smallest.values():

        def depth_fits(num_layers: int, layout: CandidateLayout = layout) -> bool:
            prediction = predict(layout, with_depth(num_layers), cluster, world_size)
            return prediction is not None and fits(prediction, cluster)

        found.append((largest(depth_fits, 1), layout))
    return sorted(found, key=lambda pair: pair[0], reverse=True)


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
