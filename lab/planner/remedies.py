"""Changes that make a layout fit: one setting, or more nodes; or two of these, if none is enough."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.planner.layouts import CandidateLayout, fits, predict, tensor_sizes, value_of, with_values
from parallel.errors import ConfigError
from parallel.fields import shown
from zero.partition.stage import STAGES

NODES = "nodes"  # an option of the planner, beside the names of settings
MAX_FACTOR = 64  # of nodes
CONTEXT_SIZES = 2, 4, 8


@dataclass(frozen=True)
class Remedy:
    """Changes, {setting or NODES: value}, with which a layout fits; `settings` have the layout and these changes."""

    changes: dict[str, Any]
    settings: Settings
    num_nodes: int

    def __str__(self) -> str:
        # The planner compares layouts with and without offload.
        options = {name: "auto" if name == "offload.mode" else shown(value) for name, value in self.changes.items()}
        return " ".join(f"--{name}={value}" for name, value in options.items())


def remedies(layout: CandidateLayout, settings: Settings, cluster: ClusterSpec, num_nodes: int) -> list[Remedy]:
    """Return, for each setting that can make the layout fit by closed forms, its first value that does.

    If there is none, return the pairs of settings that can.
    """
    base = layout.applied_to(settings)
    values = _values(base, cluster, num_nodes)
    for number in (1, 2):
        found: list[Remedy] = []
        for names in combinations(values, number):
            choices = (dict(zip(names, chosen, strict=True)) for chosen in product(*(values[name] for name in names)))
            found += islice(_that_fit(choices, base, cluster, num_nodes), 1)
        if found:
            return found
    return []


def _values(settings: Settings, cluster: ClusterSpec, num_nodes: int) -> dict[str, list[Any]]:
    """Return, of what may be changed, the values that need less memory than the present one, from the nearest."""
    sizes = tensor_sizes(cluster.gpus_per_node)
    return {
        "offload.mode": ["host"],
        "parallel.tensor_size": [size for size in sizes if size > settings.parallel.tensor_size],
        "zero.stage": [stage for stage in STAGES if stage > settings.zero.stage],
        "activations.store": ["selective", "keep"],
        "train.micro_batch_size": list(range(settings.train.micro_batch_size - 1, 0, -1)),
        "parallel.sequence_parallel": [True],
        "parallel.context_size": list(CONTEXT_SIZES),
        NODES: [num_nodes * 2**n for n in range(1, MAX_FACTOR.bit_length())],
    }


def _that_fit(
    choices: Iterable[dict[str, Any]], base: Settings, cluster: ClusterSpec, num_nodes: int
) -> Iterator[Remedy]:
    """Yield the changes of settings, and of NODES, with which the layout of `base` fits."""
    for changes in choices:
        own = {name: value for name, value in changes.items() if name != NODES}
        if any(value_of(base, name) == value for name, value in own.items()):
            continue
        try:
            changed = with_values(base, own)
        except ConfigError:
            continue
        nodes = changes.get(NODES, num_nodes)
        found = predict(CandidateLayout.of(changed), changed, cluster, nodes * cluster.gpus_per_node)
        if found is not None and fits(found, cluster):
            yield Remedy(changes, changed, nodes)
