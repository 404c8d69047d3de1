"""The choice of what stays in memory of units that do not run: its interface, and the default."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from parallel.mesh import Axis
from zero.buckets.bucket import Bucket
from zero.memory.placement import Placement
from zero.order.execution_order import ExecutionOrder
from zero.units.unit import Unit

Pass = Literal["forward", "backward"]
UnitOrders = dict[Pass, ExecutionOrder[Unit]]

NUM_KEPT = 2  # units that stay unsharded from forward to backward


class Residency(Protocol):
    """Decides how many elements are unsharded ahead, and whether units stay unsharded from forward to backward.

    It is told of each visit of a unit and of each update, and may move states in between. `orders` are the visits of
    the running and of the last passes. `earlier_peaks` are (allocated, reserved) bytes of CUDA's allocator, the highest
    before this has reset its peaks.
    """

    prefetch_numel: int
    may_keep: bool
    orders: UnitOrders

    @property
    def earlier_peaks(self) -> tuple[int, int]: ...

    def begin_forward(self) -> None: ...

    def before_visit(self, unit: Unit, phase: Pass) -> None: ...

    def after_visit(self, unit: Unit) -> None: ...

    def before_update(self, axes: Iterable[Axis]) -> None: ...

    def after_update(
        self,
        axes: Iterable[Axis],
        buckets: Sequence[Bucket],
        bytes_to_place: Callable[[Bucket], int],
        place: Callable[[Bucket, Placement], None],
    ) -> None: ...


class FixedResidency:
    """The default: units are prefetched and kept as the configuration says, and nothing is moved."""

    may_keep, earlier_peaks = True, (0, 0)

    def __init__(self, prefetch_numel: int):
        self.prefetch_numel = prefetch_numel
        self.orders: UnitOrders = {"forward": ExecutionOrder(), "backward": ExecutionOrder()}

    def begin_forward(self) -> None: ...

    def before_visit(self, unit: Unit, phase: Pass) -> None: ...

    def after_visit(self, unit: Unit) -> None: ...

    def before_update(self, axes: Iterable[Axis]) -> None: ...

    def after_update(self, *_: object) -> None: ...
