"""The atom of an optimizer: the elements whose updates depend on each other, which decides how its states are sharded.

| atom | an update needs | so |
| --- | --- | --- |
| element | the element alone: Adam, SGD | shards may begin anywhere |
| block | a block of so many elements of the parameter: 8-bit Adam | shards begin at blocks (`ZeroConfig.alignment`) |
| matrix | a whole matrix: Muon | the stretches of a matrix are sent to one rank, and its result is sent back |

A class of optimizers declares the atom of each of its groups by a method `atom(group)`; without it, all are elements.
The declaration is tested before the optimizer is used (`zero/step/elementwise.py`).
"""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Atom:
    """The smallest part of a parameter that can be updated alone."""

    is_matrix: bool
    numel: int
    """The number of elements that shards never cut: their blocks begin at the beginning of a parameter."""


ELEMENT, MATRIX = Atom(False, 1), Atom(True, 1)


def block(numel: int) -> Atom:
    """Return the atom of an optimizer that updates blocks of so many elements."""
    return Atom(False, numel)


def atom_of(optimizer: Optimizer, group: dict[str, Any]) -> Atom:
    """Return the atom of a parameter group."""
    declared = getattr(optimizer, "atom", None)
    return declared(group) if declared else ELEMENT
