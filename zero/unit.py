"""Units: the modules whose parameters are communicated together, how they are found, and in which order they run."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from torch import nn

from parallel.errors import ConfigError
from zero.flat import FlatParameters
from zero.layout import innermost_unit
from zero.stage import Lifetime


class Unit:
    """A module whose parameters are needed, and done with, together; its own are those of no smaller unit.

    Gathered for as long as somebody holds it: itself while it runs, and any unit that reads its parameters from
    outside while that one runs.
    """

    def __init__(self, flats: list[FlatParameters], before_launch: Callable[[], None] = lambda: None):
        self.flats, self._before_launch = flats, before_launch
        self.flat_of = {param: flat for flat in flats for param in flat.params}
        self.backward: int | None = None  # the backward that it is in
        self.num_open_calls = 0  # calls in forward whose backward has not ended
        self.borrowed: dict[Unit, None] = {}  # units whose parameters this one has read, in the order of first reading
        self.is_lent = False  # some other unit has read its parameters
        self._holders: set[object] = set()

    @property
    def transient_numel(self) -> int:
        """Elements that a gather brings."""
        return sum(flat.full.numel() for flat in self.flats if flat.lifetime is Lifetime.TRANSIENT)

    def start_gather(self) -> None:
        if any(flat.is_away for flat in self.flats):
            self._before_launch()
        for flat in self.flats:
            flat.start_gather()

    def gather(self, holder: object | None = None) -> None:
        """Bring the parameters, for another holder, or for itself and then those that it is known to borrow."""
        self._holders.add(holder or self)
        self.start_gather()
        for flat in self.flats:
            flat.gather()
        if holder is None:
            for lender in self.borrowed:
                lender.gather(self)

    def release(self, holder: object | None = None) -> None:
        """Done with the parameters; they go when nobody else holds them."""
        if holder is None:
            self.backward = None
            for lender in self.borrowed:
                lender.release(self)
        self._holders.discard(holder or self)
        if not self._holders:
            for flat in self.flats:
                flat.release()

    def borrow(self, lender: "Unit") -> None:
        """This unit, which is running, reads parameters of another."""
        self.borrowed[lender] = None
        lender.is_lent = True
        lender.gather(self)


class Itinerary:
    """The order in which units were visited last time, to know which come next."""

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._visited: list[Unit] = []

    def visit(self, unit: Unit) -> Iterator[Unit]:
        """The units that came after this one last time; none where this time the order is another."""
        position = len(self._visited)
        self._visited.append(unit)
        foretold = self._last[position : position + 1] == [unit]
        return islice(self._last, position + 1 if foretold else len(self._last), None)

    @property
    def is_complete(self) -> bool:
        """Whether as many units have been visited as last time."""
        return len(self._visited) == len(self._last)

    def first(self, num_units: int) -> list[Unit]:
        """Of the visits since the last restart."""
        return self._visited[:num_units]

    def restart(self) -> None:
        self._last, self._visited = self._visited, []


def named_units(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The whole model, and every module whose name matches a pattern such as "encoder.layers.*".

    Raises ConfigError for a pattern that matches nothing, and for units that share a module.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    matching: set[str] = set()
    for pattern in patterns:
        found = [
            name for name in modules if name and fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        ]
        if not found:
            raise ConfigError(f"zero.units={pattern} matches none of the {len(modules)} modules; name others, or null")
        matching.update(found)
    # In the order of the modules, not of the patterns: buckets are reduced in the reverse of it, as backward goes.
    names = ["", *(name for name in modules if name in matching)]
    owner: dict[nn.Module, str] = {}
    for name in names[1:]:
        for submodule in modules[name].modules():
            if name != owner.setdefault(submodule, name) and not _is_inside(name, owner[submodule]):
                raise ConfigError(
                    f"zero.units: {owner[submodule]} and {name} share a module; name one unit around both"
                )
    return names


def _is_inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")


def find_units(module: nn.Module) -> list[str]:
    """The whole model, and every element of its outermost module lists: the repeated blocks."""
    return ["", *_list_elements(module, "")]


def _list_elements(module: nn.Module, prefix: str) -> Iterator[str]:
    """Containers are never called, so they are no units themselves, as elements neither."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield f"{prefix}{name}"
        else:
            yield from _list_elements(child, f"{prefix}{name}.")


def assign_parameters(module: nn.Module, unit_names: list[str]) -> dict[str, dict[str, nn.Parameter]]:
    """For every unit its own parameters by name, each parameter once."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(param, []).append(name)
    units: dict[str, dict[str, nn.Parameter]] = {name: {} for name in unit_names}
    for param, names in aliases.items():
        units[innermost_unit(names, unit_names)][names[0]] = param
    return units


def alike(params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Apart by what cannot share a buffer: the type, and whether they are trained."""
    groups: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.requires_grad), {})[name] = param
    return list(groups.values())
