"""The atom of an optimizer: the elements whose updates depend on each other, which decides how its states are sharded.

| atom | an update needs | so |
| --- | --- | --- |
| element | the element alone: Adam, SGD | shards may begin anywhere |
| block | a block of so many elements of the parameter: 8-bit Adam | shards begin at blocks (`ZeroConfig.alignment`) |
| matrix | a whole matrix: Muon | the stretches of a matrix are sent to one rank, and its result is sent back |

A class of optimizers declares the atom of each of its groups by a method `atom(group)`; without it, all are elements.
The declaration is tested before the optimizer is used (`zero/step/probe.py`).

[Note: an optimizer whose atom is a row, or another part of a parameter]
Shards cannot begin at rows: they have the length of their parameter, and `alignment` is one number for all. So a row is
put together, as a matrix is:

1. Derive the optimizer from `MatrixOptimizer`: `direction` returns the values that are sent, `transform` the update of
   the elements that have been put together, with their states. If whole parameters may be sent, that is all: the atom
   is MATRIX, and `transform` computes the rows.
2. To send only the rows that shards cut, add an atom to this file, with `is_assembled`, and branch on it twice in
   `zero/optimizers/matrices.py`: `matrices_of` returns a `Matrix` of one row, `rows=range(r, r + 1)`, for each row, and
   `assign` gives it to the rank that owns its first element.

The probe, the messages (`zero/step/exchange.py`), the update and the checkpoints of its states follow: they know the
stretches of a `Matrix`, and no more of its shape.
"""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Atom:
    """The smallest part of a parameter that can be updated alone."""

    is_assembled: bool = False
    """True if shards may cut it: its stretches are then put together on one rank (`MatrixOptimizer`)."""
    numel: int = 1
    """The number of elements that shards never cut: their blocks begin at the beginning of a parameter."""


ELEMENT, MATRIX = Atom(), Atom(is_assembled=True)


def atom_of(optimizer: Optimizer, group: dict[str, Any]) -> Atom:
    """Return the atom of a parameter group."""
    declared = getattr(optimizer, "atom", None)
    return declared(group) if declared else ELEMENT
