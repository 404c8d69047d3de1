"""The atom of an optimizer: the elements whose updates depend on each other, which decides how its states are sharded.

| atom | an update needs | so |
| --- | --- | --- |
| element | the element alone: Adam, SGD | shards may begin anywhere |
| block | a block of so many elements of the parameter: 8-bit Adam | shards begin at blocks (`ZeroConfig.alignment`) |
| matrix | a whole matrix: Muon | the stretches of a matrix are sent to one rank, and its result is sent back |

A class of optimizers declares the atom of each of its groups by a method `atom(group)`; without it, all are elements.
Atoms that shards cut are put together by updates that the class brings (`zero/core/step/assembled_updates.py`). The
declaration is tested before the optimizer is used (`zero/core/step/probe.py`).

[Note: an optimizer whose atom is a row, or another part of a parameter]
Shards cannot begin at rows: they have the length of their parameter, and `alignment` is one number for all. So a row is
put together, as a matrix is: derive the optimizer from `MatrixOptimizer`. `direction` writes the values that are sent,
and `transform` gets equal parameters whole on one rank and computes each row by itself. A state with a value for each
row is a tensor (rows,) in `matrix_state`, as in NorMuon (`normalize_rows_` in zero/updates/muon.py). The atom stays
MATRIX, so the probe, the messages, the update and zero's checkpoints follow. The cost is that of a matrix: all elements
are sent, parameters must have two dims, and `ZeroOptimizer.state_dict` raises ConfigError. Parts of tensor ranks are
joined even if these divide a parameter by rows; with `joins_parts=False` they are not, but then the rows of a parameter
that is divided by columns are cut. If `matrix_state` is not empty, every replica computes all matrices.

To send only the rows that shards cut would need more: an atom of its own that `matrices_of` and `assign`
(zero/updates/matrices.py) are given together with the layouts, rows that are not joined over the tensor ranks that
divide them, and a probe that passes single rows.
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
