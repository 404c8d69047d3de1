"""Settings and values that earlier versions had.

The config.yaml of a run names every setting. One that is removed is still accepted if it has the default value that it
had, which is what the program does without it.
"""

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A setting that is removed: the default value that it had, and what a user does who needs another value."""

    default: Any
    remedy: str


# By dotted names; a group that is removed has a row for each of its settings.
REMOVED_SETTINGS = {
    "activations.budget_gb": Removed(
        None, "remove it, and choose activations.budget with train.compile=blocks and activations.store=none"
    ),
    "activations.hardware.memory_gb_per_second": Removed(900.0, "nothing reads it: remove it"),
    "optimizer.dion.rank_fraction": Removed(0.25, "choose optimizer.name=muon, which has no such setting"),
    "optimizer.dion.lr_factor": Removed(1.0, "choose optimizer.name=muon and optimizer.muon.lr_factor"),
}
# Of settings that remain, the values that are removed, each with what a user chooses instead.
REMOVED_VALUES = {
    "activations.store": {"planned": "choose keep or auto; or none with activations.budget and train.compile=blocks"},
    "optimizer.name": {"dion": "choose muon"},
}


def is_removed(name: str) -> bool:
    """Return True if earlier versions had a setting or a group of this name."""
    return any(f"{removed}.".startswith(f"{name}.") for removed in REMOVED_SETTINGS)


def problem_of(name: str, value: Any) -> str | None:
    """Return why this version cannot do what a value asks for, with the remedy; None if nothing of it is removed."""
    if name in REMOVED_SETTINGS:
        return None if value == REMOVED_SETTINGS[name].default else f"is removed; {REMOVED_SETTINGS[name].remedy}"
    remedy = REMOVED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return remedy and f"is removed; {remedy}"
