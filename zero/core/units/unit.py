"""Units: the modules whose parameters are unsharded together, and how they are found in a model.

[Note: who frees a unit] Its memory is freed when its last reader releases it:

    reader                          released by                     when
    the unit itself, in forward     UnitScheduler.after_forward     its outermost call ends, unless [Note: keeping]
    the unit itself, in backward    UnitScheduler._end              the gradient of an input is known, or the backward
                                                                    of an older call begins
                                    UnitScheduler.end_backward      otherwise, when backward ends
    another unit that has read it   Unit.reshard of that unit       that unit is resharded
    `gathered()`                    Unit.stop_watch                 its context ends
    STEP, FORWARD                   UnitAccess.reach                the step, or the next forward, begins: if it is not
                                                                    known when autograd reads it for the last time

`Unit.release` frees it by `FlatParameters.reshard`. A unit that is prefetched has no reader until it runs; if it never
does, the end of the next backward frees it, a nested one if it ran there. Three callers free parameters whatever their
readers: `ShardedOptimizer._publishing` and `Engine.loading_masters`, after which the readers still hold the unit, and
`Unit.unwrap`. [Note: keeping] is in zero/core/units/scheduler.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from parallel.autograd_internals import outside_of_transforms
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.stage import Lifetime
from zero.core.protocols.extension import Extensions


class Unit:
    """A module, with the parameters that belong to it and to no unit inside it; they are unsharded together.

    It stays unsharded while it has a reader: see [Note: who frees a unit].
    """

    def __init__(self, number: int, module: nn.Module, flats: list[FlatParameters], extensions: Extensions):
        """Make unit `number` of an engine."""
        self.module, self.flats, self.number, self._extensions = module, flats, number, extensions
        self.flat_of = {param: flat for flat in flats for param in flat.params}
        self.num_open_calls = 0  # calls in forward whose backward has not ended
        self.has_left_calls = False  # a backward of this step has ended without reaching all of them
        self._others: dict[Unit, None] = {}  # units whose parameters this one has read, in the order of first reading
        self.is_shared = False  # something outside the unit has read its parameters
        self.saved_tensors_recorded = False  # in a call, so that `has_side_outputs` is known
        self.has_side_outputs = False  # tensors that leave by other ways than being returned
        self._readers: set[object] = set()
        self._watchers: set[object] = set()

    @cached_property
    def transient_numel(self) -> int:
        """The number of elements that unsharding allocates."""
        return sum(flat.full.numel() for flat in self.flats if flat.lifetime is Lifetime.TRANSIENT)

    @property
    def is_readable(self) -> bool:
        """True if the unit has a reader; after an update or a load its parameters may be sharded nevertheless."""
        return bool(self._readers)

    @property
    def is_retained_outside(self) -> bool:
        """True if a reader is no unit: a `gathered()` context, the step, or the next forward."""
        return any(not isinstance(reader, Unit) for reader in self._readers)

    def start_unshard(self, *, lossless: bool = False) -> None:
        """Launch the all-gathers, if any is needed, without adding a reader; with `lossless`, of all digits."""
        if any(flat.is_sharded for flat in self.flats):
            self._launch_gathers(lossless)

    @outside_of_transforms
    def _launch_gathers(self, lossless: bool) -> None:
        self._extensions.on_launch("gather", self.number)
        for flat in self.flats:
            flat.start_unshard(lossless=lossless)

    @outside_of_transforms
    def retain(self, reader: object, *, lossless: bool = False) -> None:
        """Make the parameters readable until `reader` releases them."""
        self._readers.add(reader)
        self.start_unshard(lossless=lossless)
        self._extensions.before_read(self.flat_of)
        for flat in self.flats:
            flat.unshard()

    @outside_of_transforms
    def release(self, reader: object) -> None:
        """Free the parameters, unless something else reads them."""
        self._readers.discard(reader)
        if not self._readers:
            for flat in self.flats:
                flat.reshard()

    def unshard(self) -> None:
        """Make the parameters readable for the unit itself, and those of the units that it reads from."""
        self.retain(self)
        for other in self._others:
            other.retain(self)

    def reshard(self) -> None:
        """Undo `unshard`."""
        for other in self._others:
            other.release(self)
        self.release(self)

    def read_from(self, other: "Unit") -> None:
        """Unshard another unit, whose parameters this one reads whenever it runs."""
        self._others[other] = None
        other.is_shared = True
        other.retain(self)

    @property
    def is_watched(self) -> bool:
        """True inside `gathered()` of its parameters."""
        return bool(self._watchers)

    def watch(self, reader: object) -> None:
        """Retain the unit, and have reads of its parameters reported."""
        self.retain(reader, lossless=True)
        self._gather_lost_digits()
        self._watchers.add(reader)
        for flat in self.flats:
            flat.watch_reads(True)

    def stop_watch(self, reader: object) -> None:
        """Undo `watch`; what was written in between is kept, if it was the last one."""
        self._watchers.discard(reader)
        for flat in () if self._watchers else self.flats:
            flat.watch_reads(False)
        self.release(reader)

    def unwrap(self, device: torch.device | None) -> None:
        """Give the parameters their values in memory of their own."""
        self.retain(self, lossless=True)
        self._gather_lost_digits()
        for flat in self.flats:
            flat.unwrap(device)
        self._readers.clear()

    def end(self) -> None:
        """Let go of the parameters, and of other units, when the engine ends."""
        for flat in self.flats:
            flat.end()
        self._readers.clear()
        self._others.clear()

    def _gather_lost_digits(self) -> None:
        """Gather again what was unsharded before, and has lost digits."""
        if any(flat.transport.is_lossy for flat in self.flats):
            self._extensions.on_launch("gather", self.number)
        for flat in self.flats:
            flat.gather_lost_digits()


@dataclass(eq=False)
class Call:
    """A call of a module of a unit in forward, and its backward. Times are of the scheduler's clock."""

    unit: Unit
    module: nn.Module
    began: int
    ended: int = 0
    is_counted: bool = False  # among the unit's open calls
    inputs: dict[int, int] = field(default_factory=dict)  # the versions of tensors that are passed in, by `id`
    depth: int = 1  # calls of the module inside itself
    saved: saved_tensors_hooks | None = None  # while the call is watched
    graph_task: int | None = None  # of the backward that it was last in


def named_units(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the units: the whole model, and each module that matches a pattern like "encoder.layers.*".

    Raises ConfigError if a pattern matches nothing, or if two units share a module.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    matching: set[str] = set()
    for pattern in patterns:
        found = [
            name for name in modules if name and fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        ]
        if not found:
            raise ConfigError(
                f"ZeroConfig.units={pattern} matches none of the {len(modules)} modules; choose another pattern, "
                "or null"
            )
        matching.update(found)
    # In the order of the modules, not of the patterns: buckets are reduced in the reverse order, as backward runs.
    names = ["", *(name for name in modules if name in matching)]
    owner: dict[nn.Module, str] = {}
    for name in names[1:]:
        for submodule in modules[name].modules():
            first = owner.setdefault(submodule, name)
            if name != first and not name.startswith(f"{first}."):
                raise ConfigError(f"ZeroConfig.units: {first} and {name} share a module; name one unit around both")
    return names


def find_units(module: nn.Module) -> list[str]:
    """Return the names of the units: the whole model, and the elements of its outermost module lists (the blocks)."""
    return ["", *_list_elements(module, "")]


def _list_elements(module: nn.Module, prefix: str) -> Iterator[str]:
    """Iterate over the elements' names. ModuleList and ModuleDict, which are never called, are no units."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield f"{prefix}{name}"
        else:
            yield from _list_elements(child, f"{prefix}{name}.")


def assign_parameters(module: nn.Module, unit_names: list[str]) -> dict[str, dict[str, nn.Parameter]]:
    """Return the own parameters of each unit by name, each parameter once.

    A parameter that is tied across two units belongs to the unit around both, and is unsharded when either runs.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(name)
    units: dict[str, dict[str, nn.Parameter]] = {name: {} for name in unit_names}
    for param, names in aliases.items():
        units[innermost_unit(names, unit_names)][names[0]] = param
    return units


def innermost_unit(parameter_names: Iterable[str], unit_names: Iterable[str]) -> str:
    """Return the smallest unit that contains a parameter under all of its names; "" is the whole model."""
    names = list(parameter_names)
    return max((u for u in unit_names if all(f".{name}".startswith(f".{u}." if u else ".") for name in names)), key=len)


def in_order_of_use(units: Iterable[Unit], module: nn.Module) -> list[Bucket]:
    """Return the buckets that get gradients; inside a unit, in the order in which the module has their parameters.

    A unit may have several flat buffers, each with parameters of all of its layers: reduced one buffer after the other,
    the buckets of one would wait, in memory, for the first layer of the other.
    """
    places = {param: place for place, param in enumerate(module.parameters())}
    return [
        bucket
        for unit in units
        for bucket in sorted(
            (bucket for flat in unit.flats if flat.is_trainable for bucket in flat.buckets),
            key=lambda bucket: min((places[param] for param in bucket.grads.parts), default=len(places)),
        )
    ]


def group_alike(params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Group parameters by (dtype, requires_grad): only those of one group can share a flat buffer."""
    groups: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.requires_grad), {})[name] = param
    return list(groups.values())
