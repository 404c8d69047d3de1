"""Changes that make a layout fit: one setting, or more nodes; or two of these, if none is enough."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Any

from lab.planner.layouts import CandidateLayout, fits, tensor_sizes, value_of, with_values
from lab.planner.search import Search, show_progress
from parallel.validation.errors import ConfigError
from parallel.validation.fields import shown
from zero.core.partition.stage import STAGES

NODES = "nodes"  # an option of the planner, beside the names of settings
MAX_FACTOR = 64  # of nodes
CONTEXT_SIZES = 2, 4, 8
MAX_VERIFIED = 6  # remedies that are confirmed by dry runs


@dataclass(frozen=True)
class Remedy:
    """Changes, {setting or NODES: value}, with which the layout of the search's settings fits."""

    changes: dict[str, Any]
    search: Search

    def __str__(self) -> str:
        # The planner compares layouts with and without offload.
        options = {name: "auto" if name == "offload.mode" else shown(value) for name, value in self.changes.items()}
        return " ".join(f"--{name}={value}" for name, value in options.items())


def remedies(layout: CandidateLayout, search: Search) -> list[Remedy]:
    """Return, for each setting that can make the layout fit by closed forms, its first value that does.

    If there is none, return the pairs of settings that can.
    """
    base = replace(search, settings=layout.applied_to(search.settings))
    values = _values(base)
    for number in (1, 2):
        found: list[Remedy] = []
        for names in combinations(values, number):
            choices = (dict(zip(names, chosen, strict=True)) for chosen in product(*(values[name] for name in names)))
            found += islice(_that_fit(choices, base), 1)
        if found:
            return found
    return []


def verified_remedies(layout: CandidateLayout, search: Search) -> str:
    """Return, in words, what makes a layout fit in a dry run."""
    found = []
    for remedy in remedies(layout, search)[:MAX_VERIFIED]:
        show_progress(f"dry run with {remedy}")
        try:
            estimate = remedy.search.estimate(CandidateLayout.of(remedy.search.settings))
        except ConfigError:
            continue
        if search.fits(estimate):
            found.append(f"{remedy} ({estimate.device_peak_bytes / 1e9:.1f} GB)")
    return f"it fits with {', or with '.join(found)}" if found else "use a smaller model"


def _values(search: Search) -> dict[str, list[Any]]:
    """Return, of what may be changed, the values that need less memory than the present one, from the nearest."""
    settings, sizes = search.settings, tensor_sizes(search.cluster.gpus_per_node)
    return {
        "offload.mode": ["host"],
        "parallel.tensor_size": [size for size in sizes if size > settings.parallel.tensor_size],
        "zero.stage": [stage for stage in STAGES if stage > settings.zero.stage],
        "activations.store": ["selective", "keep"],
        "train.micro_batch_size": list(range(settings.train.micro_batch_size - 1, 0, -1)),
        "parallel.sequence_parallel": [True],
        "parallel.context_size": list(CONTEXT_SIZES),
        NODES: [search.num_nodes * 2**n for n in range(1, MAX_FACTOR.bit_length())],
    }


def _that_fit(choices: Iterable[dict[str, Any]], base: Search) -> Iterator[Remedy]:
    """Yield the changes of settings, and of NODES, with which the layout of `base` fits."""
    for changes in choices:
        own = {name: value for name, value in changes.items() if name != NODES}
        if any(value_of(base.settings, name) == value for name, value in own.items()):
            continue
        try:
            changed = with_values(base.settings, own)
        except ConfigError:
            continue
        world_size = changes.get(NODES, base.num_nodes) * base.cluster.gpus_per_node
        search = replace(base, settings=changed, world_size=world_size)
        found = search.predict(CandidateLayout.of(changed))
        if found is not None and fits(found, base.cluster):
            yield Remedy(changes, search)
