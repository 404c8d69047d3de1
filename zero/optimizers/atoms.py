"""The atom of an optimizer: the elements whose updates depend on each other, which decides how its states are sharded.

| atom | an update needs | so |
| --- | --- | --- |
| element | the element alone: Adam, SGD | shards may begin anywhere |
| matrix | a whole matrix: Muon | the stretches of a matrix are sent to one rank, and its result is sent back |

A class of optimizers declares the atom of each of its groups by a method `atom(group)`; without it, all are elements.
The declaration is tested before the optimizer is used (`zero/elementwise.py`).
"""

from enum import Enum
from typing import Any

from torch.optim import Optimizer


class Atom(Enum):
    """The smallest part of a parameter that can be updated alone."""

    ELEMENT = "an element"
    MATRIX = "a matrix"


def atom_of(optimizer: Optimizer, group: dict[str, Any]) -> Atom:
    """Return the atom of a parameter group."""
    declared = getattr(optimizer, "atom", None)
    return declared(group) if declared else Atom.ELEMENT
