"""The choice of what stays in memory of units that do not run."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from parallel.mesh import Axis
from zero.buckets.bucket import Bucket
from zero.memory.placement import Placement
from zero.order.orders import ExecutionOrder
from zero.units.unit import Unit

Pass = Literal["forward", "backward"]
UnitOrders = dict[Pass, ExecutionOrder[Unit]]

NUM_KEPT = 2  # units that stay unsharded from forward to backward


class Residency:
    """Decides how many elements are unsharded ahead, and whether units stay unsharded from forward to backward.

    It is told of each visit of a unit and of each update, and may move states in between. This one is the default, by
    which units are prefetched and kept as the configuration says, and nothing is moved. `orders` are the visits of the
    running and of the last passes.
    """

    def __init__(self, prefetch_numel: int, may_keep: bool = True):
        self.prefetch_numel, self.may_keep = prefetch_numel, may_keep
        self.orders: UnitOrders = {"forward": ExecutionOrder(), "backward": ExecutionOrder()}

    @property
    def earlier_peaks(self) -> tuple[int, int]:
        """The highest (allocated, reserved) bytes of CUDA's allocator before this has reset its peaks."""
        return 0, 0

    def begin_forward(self) -> None:
        """Begin a forward of the whole model."""

    def before_visit(self, unit: Unit, phase: Pass) -> None:
        """Prepare for a unit that is about to be unsharded, and for its computation."""

    def after_visit(self, unit: Unit) -> None:
        """Note that a unit has been unsharded."""

    def before_update(self, axes: Iterable[Axis]) -> None:
        """Prepare for the update; `axes` have all ranks of the model."""

    def after_update(
        self,
        axes: Iterable[Axis],
        buckets: Sequence[Bucket],
        bytes_to_place: Callable[[Bucket], int],
        place: Callable[[Bucket, Placement], None],
    ) -> None:
        """End a step; the functions say what a bucket's optimizer states take on the accelerator, and move them."""
