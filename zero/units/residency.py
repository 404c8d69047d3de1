"""The interface between the schedule of units and the choice of memory that stays allocated while they do not run."""

from typing import Literal, Protocol

from zero.order.execution_order import ExecutionOrder
from zero.units.unit import Unit

Pass = Literal["forward", "backward"]
UnitOrders = dict[Pass, ExecutionOrder[Unit]]

NUM_KEPT = 2  # units that stay unsharded from forward to backward


class Residency(Protocol):
    """Decides how many elements are unsharded ahead, and whether units stay unsharded from forward to backward."""

    prefetch_numel: int
    may_keep: bool

    def start_forward(self) -> None: ...

    def before_visit(self, unit: Unit, phase: Pass) -> None: ...

    def after_visit(self, unit: Unit) -> None: ...
