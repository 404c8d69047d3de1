"""Why the neighbours of a chosen layout lose: those that differ from it by one step of one setting."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from lab.planner.depth import Estimate
from lab.planner.layouts import FIELDS, CandidateLayout, Store
from lab.planner.search import Search, show_progress
from parallel.validation.errors import ConfigError
from parallel.validation.fields import shown

ORDERED_STORES = get_args(Store)


def neighbours(layout: CandidateLayout, search: Search) -> list[CandidateLayout]:
    """Return the layouts that a run could use and that have the next value, up or down, of one setting."""
    possible = [found.layout for found in search.possible_layouts()]
    found = []
    for field in FIELDS.values():
        alike = [one for one in possible if vars(one) | {field: None} == vars(layout) | {field: None}]
        alike.sort(key=lambda one: _place(getattr(one, field)))
        if layout in alike:
            place = alike.index(layout)
            found += [*alike[max(0, place - 1) : place], *alike[place + 1 : place + 2]]
    return found


def _place(value: Any) -> tuple[int, str]:
    """Return where a value of a setting stands among the others."""
    if value in ORDERED_STORES:
        return ORDERED_STORES.index(value), ""
    return (value, "") if isinstance(value, int) else (0, str(value or ""))


def explanations(layout: CandidateLayout, search: Search) -> Iterator[str]:
    """Yield a line for each neighbour of the layout, which a dry run estimates."""
    best = search.estimate(layout)
    for other in neighbours(layout, search):
        show_progress(f"dry run of a neighbour: {other}")
        try:
            why = verdict(search.estimate(other), best, search)
        except ConfigError as error:
            why = f"refused: {error}"
        (name,) = (name for name, field in FIELDS.items() if getattr(other, field) != getattr(layout, field))
        yield f"--{name}={shown(getattr(other, FIELDS[name]))}: {why}"


def verdict(other: Estimate, best: Estimate, search: Search) -> str:
    """Return why a layout loses against the best one: the memory or the time, and the part of it that differs most."""
    gigabytes, seconds = other.device_peak_bytes / 1e9, other.seconds
    memory = f"{gigabytes:.1f} GB, {_largest_change(best.memory, other.memory, 1e9, 'GB')}"
    if not search.fits(other):
        on_host = other.host_peak_bytes * search.cluster.gpus_per_node / 1e9
        if gigabytes > search.cluster.usable_gpu_bytes / 1e9:
            return f"does not fit {search.cluster.usable_gpu_bytes / 1e9:.1f} GB: {memory}"
        return f"does not fit the {search.cluster.host_memory_gb:.0f} GB of a host: {on_host:.0f} GB"
    time = f"{seconds:.3g} s, {_largest_change(best.time, other.time, 1, 's')}"
    if seconds > (1 + search.error) * best.seconds:
        return f"slower: {time}"
    if other.device_peak_bytes > best.device_peak_bytes:
        return f"a tie with less room: {memory}; {time}"
    return f"a tie with as much room or more, which was not verified; give this option to use it: {memory}; {time}"


def _largest_change(before: Mapping[str, float], after: Mapping[str, float], unit: float, name: str) -> str:
    """Return the part that grows most; if none does, the one that shrinks most."""
    changes = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / unit for part in before.keys() | after.keys()}
    grows = any(change > 0 for change in changes.values())
    part = max(sorted(changes), key=lambda one: changes[one] if grows else -changes[one], default="")
    return f"of which {part} {changes[part]:+.3g} {name}" if part else "whose parts are unknown"
