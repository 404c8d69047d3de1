"""Planning what stays on the accelerator within a budget of memory, learnt while training (Gemini).

first steps     all states that may be offloaded are on the host, and nothing is prefetched. At every visit of a unit
                the recorder notes the peak since the visit before: activations, buffers, the parameters in use. The
                first step shows, before its update, whether the budget can be kept; the second, by which all buffers
                have been allocated, how much room is left
then            room = budget - peak, at each visit. It is given to units that are prefetched first, then to the device
                cache of parameter shards, which are needed twice a micro-batch, then to the optimizer's states, which
                are needed once a step
from then on    at each visit the shards that are used soonest stay in the device cache, as many as there is room for
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket, ParamShard
from zero.core.protocols.home import Home, Homes
from zero.core.units.scheduler import NUM_KEPT, Pass, Residency, UnitOrders
from zero.core.units.unit import Unit
from zero.homes.budget.chunks import Cycle
from zero.homes.budget.recorder import GIGA, UPDATE, MemoryRecorder, Moment
from zero.settings.config import OffloadConfig

logger = logging.getLogger(__name__)

SHARE_WITHOUT_BUDGET = 0.9  # of the accelerator, with auto: CUDA and NCCL need the rest


class CachedShards(NamedTuple):
    """The shards of parameters that are in the device cache around one visit of a unit."""

    before_gather: frozenset[ParamShard]
    after_gather: frozenset[ParamShard]


NONE_CACHED = CachedShards(frozenset(), frozenset())


class PlacementPlanner(Residency):
    """Decides what a rank keeps on its accelerator: units that are prefetched or kept, shards, optimizer states.

    With `auto` nothing is prefetched or kept until the recorded steps have shown how much room there is, and then a
    plan is made. Else units are prefetched and kept as the configuration says, and the budget is only checked.
    """

    def __init__(self, offload: OffloadConfig, homes: Homes, prefetch_numel: int):
        self._is_auto, self._homes = offload.mode == "auto", homes
        super().__init__(0 if self._is_auto else prefetch_numel, may_keep=not self._is_auto)
        self._configured_prefetch_numel = prefetch_numel
        self.recorder = MemoryRecorder(homes.device, _budget_bytes(offload, homes.device))
        self._planned_units: dict[Moment, Unit] = {}
        self._plan: dict[Moment, CachedShards] = {}
        self._cached: set[ParamShard] = set()
        self._deviates = False  # from the order that was planned for, in this step

    @property
    def earlier_peaks(self) -> tuple[int, int]:
        """The highest (allocated, reserved) bytes of CUDA's allocator before the planner has reset its peaks."""
        return self.recorder.meter.earlier_peaks

    def check_units(self, units: Iterable[Unit], staging_bytes: int) -> None:
        """Check that the budget holds the two largest units, as if one were inside the other, and staged gradients.

        Raises ConfigError if it does not: no step could run.
        """
        budget_bytes = self.recorder.budget_bytes
        num_bytes = [sum(flat.unsharding_bytes for flat in unit.flats) for unit in units]
        least = sum(sorted(num_bytes)[-2:]) + staging_bytes
        if least > budget_bytes:
            raise ConfigError(
                f"OffloadConfig.accelerator_memory_gb={budget_bytes / GIGA:g} is too small: the parameters of "
                f"two units and staged gradients alone take {least / GIGA:.6g}, "
                f"{(least - budget_bytes) / GIGA:.6g} more; choose ZeroConfig.stage=3, smaller ZeroConfig.units, "
                "a smaller ZeroConfig.bucket_numel, or more tensor ranks"
            )

    def begin_forward(self) -> None:
        """Begin a forward of the whole model."""
        self.recorder.begin_forward()

    def before_visit(self, unit: Unit, phase: Pass) -> None:
        """Make room for a unit that is about to be unsharded, and for its computation."""
        if not self._is_auto and not self.recorder.is_recording:
            return
        moment = phase, len(self.orders[phase].current)
        self.recorder.enter(moment)
        if not self.recorder.is_recording:
            self._deviates |= self._planned_units.get(moment) is not unit
            self._evict_all_but(self._planned().before_gather)

    def after_visit(self, unit: Unit) -> None:
        """Fetch the shards of a unit that has been unsharded into the device cache, as far as they are to stay."""
        staying = self._planned().after_gather
        self._evict_all_but(staying)
        for shard in _shards_on_host([unit]) if staying else ():
            if shard in staying and shard not in self._cached:
                shard.fetch()
                self._cached.add(shard)

    def before_update(self, axes: Iterable[Axis]) -> None:
        """Make room for the update.

        Raises ConfigError if a recorded step has needed more than the budget so far.
        """
        self.recorder.enter(UPDATE)
        if self.recorder.is_recording:
            self.recorder.check(axes)
        self._evict_all_but(self._planned().before_gather)

    def after_update(
        self,
        axes: Iterable[Axis],
        buckets: Sequence[Bucket],
        bytes_to_place: Callable[[Bucket], int],
        place: Callable[[Bucket, Home], None],
    ) -> None:
        """End a step; after the last one that is recorded, make the plan.

        Raises ConfigError if a recorded step has needed more than the budget.
        """
        self._deviates = False
        if not self.recorder.is_recording:
            return
        self.recorder.enter(UPDATE)
        least_room = self.recorder.check(axes)
        if self.recorder.end_step() and self._is_auto:
            self.prefetch_numel, self.may_keep, unit_bytes = choose_units(
                self.orders, self._configured_prefetch_numel, least_room
            )
            shards = _shards_on_host({unit for order in self.orders.values() for unit in order.current})
            room = least_room - unit_bytes - sum(shard.rest.nbytes for shard in shards)
            here = self._homes.accelerator
            placed_bytes = place_optimizer_states(buckets, room, bytes_to_place, lambda bucket: place(bucket, here))
            self._plan_cache(unit_bytes + placed_bytes)
            num_placed = sum(not bucket.home.is_apart for bucket in buckets)
            logger.info(
                "offload: %.3g of %.3g GB are free at the tightest moment; %.3g for units that are prefetched or kept, "
                "%.3g for the optimizer's states of %d of %d buckets, the rest for shards of parameters",
                least_room / GIGA,
                self.recorder.budget_bytes / GIGA,
                unit_bytes / GIGA,
                placed_bytes / GIGA,
                num_placed,
                len(buckets),
            )

    def _plan_cache(self, taken_bytes: int) -> None:
        """Plan which shards are in the device cache at each moment, in the budget without `taken_bytes`."""
        self._planned_units = {
            (phase, number): unit for phase, order in self.orders.items() for number, unit in enumerate(order.current)
        }
        moments = [*self._planned_units, UPDATE]
        uses = [_shards_on_host([unit]) for unit in self._planned_units.values()]
        rooms = [self.recorder.budget_bytes - self.recorder.peaks[moment] - taken_bytes for moment in moments]
        plan = Cycle([*uses, []]).plan(rooms, lambda shard: shard.rest.nbytes)
        self._plan = {moment: CachedShards(*shards) for moment, shards in zip(moments, plan, strict=True)}

    def _planned(self) -> CachedShards:
        return NONE_CACHED if self._deviates else self._plan.get(self.recorder.moment, NONE_CACHED)

    def _evict_all_but(self, staying: frozenset[ParamShard]) -> None:
        for shard in self._cached - staying:
            shard.evict()
        self._cached &= staying


def _budget_bytes(offload: OffloadConfig, device: torch.device) -> float:
    """Return the limit of the accelerator's memory. Raises ConfigError if auto needs one."""
    if offload.accelerator_memory_gb is not None:
        return offload.accelerator_memory_gb * GIGA
    if device.type != "cuda":
        raise ConfigError(
            f"OffloadConfig.mode=auto on {device.type} has no accelerator to fill; "
            "set OffloadConfig.accelerator_memory_gb"
        )
    return SHARE_WITHOUT_BUDGET * torch.cuda.get_device_properties(device).total_memory


def choose_units(orders: UnitOrders, prefetch_numel: int, room_bytes: int) -> tuple[int, bool, int]:
    """Return how many elements to prefetch, at most `prefetch_numel`, whether to keep units, and the bytes of both.

    Elements that are prefetched take at most half of the room, and none of it if that does not hold each of the units.
    """
    units = {unit for order in orders.values() for unit in order.current}
    itemsize = max((-(-flat.unsharding_bytes // flat.full.numel()) for u in units for flat in u.flats), default=1)
    numels = [unit.transient_numel for unit in units]
    ahead_numel = min(prefetch_numel, sum(numels), room_bytes // 2 // itemsize)
    if any(numel > ahead_numel for numel in numels):
        ahead_numel = 0
    kept_numel = sum(unit.transient_numel for unit in orders["backward"].current[:NUM_KEPT])
    may_keep = (ahead_numel + kept_numel) * itemsize <= room_bytes
    return ahead_numel, may_keep, (ahead_numel + kept_numel * may_keep) * itemsize


def place_optimizer_states(
    buckets: Sequence[Bucket],
    room_bytes: float,
    bytes_to_place: Callable[[Bucket], int],
    place: Callable[[Bucket], None],
) -> int:
    """Move the optimizer's states of as many buckets to the accelerator as fit; return their bytes."""
    used = cast = 0
    for bucket in buckets:
        if bucket.home.is_apart:
            if bucket.casts_gradient:
                cast = max(cast, bucket.master.nbytes)  # the optimizer's buffer for a cast gradient
            num_bytes = bytes_to_place(bucket)
            if used + num_bytes + cast > room_bytes:
                break  # not continue: the order of the update's all-gathers counts on the first buckets being placed
            used += num_bytes
            place(bucket)
    return used + cast if used else 0


def _shards_on_host(units: Iterable[Unit]) -> list[ParamShard]:
    shards = [bucket.params for unit in units for flat in unit.flats for bucket in flat.buckets]
    return [shard for shard in shards if shard.home.is_apart]
