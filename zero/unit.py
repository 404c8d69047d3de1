"""Units: the modules whose parameters are communicated together, how they are found, and in which order they run."""

from torch import nn

from zero.flat import FlatParameters
from zero.layout import innermost_unit


class Unit:
    """A module whose parameters are needed, and done with, together; its own are those of no smaller unit."""

    def __init__(self, params: list[nn.Parameter], flats: list[FlatParameters]):
        self.params, self.flats = params, flats
        self.backward: int | None = None  # the backward that it is in
        self.num_open_calls = 0  # calls in forward whose backward has not ended

    def start_gather(self) -> None:
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        self.start_gather()
        for flat in self.flats:
            flat.gather()

    def release(self) -> None:
        self.backward = None
        for flat in self.flats:
            flat.release()


class Itinerary:
    """The order in which units were visited last time, to know which comes next."""

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._visited: list[Unit] = []

    def visit(self, unit: Unit) -> Unit | None:
        position = len(self._visited)
        self._visited.append(unit)
        if self._last[position : position + 1] == [unit] and position + 1 < len(self._last):
            return self._last[position + 1]
        return None

    def restart(self) -> None:
        self._last, self._visited = self._visited, []


def find_units(module: nn.Module) -> list[str]:
    """The whole model, and every element of its outermost module lists: the repeated blocks."""
    names = [""]
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and not any(name.startswith(f"{unit}.") for unit in names[1:]):
            names += [f"{name}.{index}" for index in range(len(child))]
    return names


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
