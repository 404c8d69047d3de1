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
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket, ParamShard
from zero.core.engine import Engine, EngineOptimizer
from zero.core.protocols.extension import Extension, Pass
from zero.core.protocols.orders import Round
from zero.core.units.scheduler import NUM_KEPT, UnitOrders
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


class PlacementPlanner(Extension):
    """Decides what a rank keeps on its accelerator: units that are prefetched or kept, shards, optimizer states.

    With `auto` nothing is prefetched or kept until the recorded steps have shown how much room there is, and then a
    plan is made. Else units are prefetched and kept as the configuration says, and the budget is only checked.
    """

    def __init__(self, offload: OffloadConfig, device: torch.device):
        self._is_auto = offload.mode == "auto"
        self.recorder = MemoryRecorder(device, _budget_bytes(offload, device))
        self._planned_units: dict[Moment, int] = {}
        self._plan: dict[Moment, CachedShards] = {}
        self._cached: set[ParamShard] = set()
        self._deviates = False  # from the order that was planned for, in this step

    def on_built(self, engine: Engine) -> None:
        self._engine_ref = weakref.ref(engine)
        self._configured_prefetch_numel = engine.residency.prefetch_numel
        pools = [engine.reducer.reductions.staging, *(p for home in engine.homes.all for p in home.pools.values())]
        self.check_units(engine.units.values(), sum(pool.num_bytes for pool in pools))
        if self._is_auto:
            engine.residency.prefetch_numel, engine.residency.may_keep = 0, False

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

    def on_round(self, following: Round) -> None:
        if following is Round.FORWARD:
            self.recorder.begin_forward()

    def on_unit(self, number: int, phase: Pass) -> None:
        """Make room for a unit that is about to be unsharded, and for its computation."""
        if not self._is_auto and not self.recorder.is_recording:
            return
        moment = phase, len(self._engine.residency.orders[phase].current)
        self.recorder.enter(moment)
        if not self.recorder.is_recording:
            self._deviates |= self._planned_units.get(moment) != number
            self._evict_all_but(self._planned().before_gather)

    def after_unshard(self, number: int) -> None:
        """Fetch the shards of a unit that has been unsharded into the device cache, as far as they are to stay."""
        staying = self._planned().after_gather
        self._evict_all_but(staying)
        for shard in _shards_on_host([list(self._engine.units.values())[number]]) if staying else ():
            if shard in staying and shard not in self._cached:
                shard.fetch()
                self._cached.add(shard)

    def before_update(self) -> None:
        """Make room for the update.

        Raises MemoryLimitError if a recorded step has needed more than the budget so far.
        """
        self.recorder.enter(UPDATE)
        if self.recorder.is_recording:
            self.recorder.check(self._axes())
        self._evict_all_but(self._planned().before_gather)

    def after_update(self) -> None:
        """End a step; after the last one that is recorded, make the plan.

        Raises MemoryLimitError if a recorded step has needed more than the budget.
        """
        self._deviates = False
        if not self.recorder.is_recording:
            return
        self.recorder.enter(UPDATE)
        least_room = self.recorder.check(self._axes())
        if self.recorder.end_step() and self._is_auto:
            self._place(least_room)

    def _place(self, least_room: int) -> None:
        """Plan what takes the room of the tightest moment, and move the optimizer's states."""
        residency, homes, optimizer = self._engine.residency, self._engine.homes, self._optimizer
        residency.prefetch_numel, residency.may_keep, unit_bytes = choose_units(
            residency.orders, self._configured_prefetch_numel, least_room
        )
        shards = _shards_on_host({unit for order in residency.orders.values() for unit in order.current})
        room = least_room - unit_bytes - sum(shard.rest.nbytes for shard in shards)
        placed_bytes = place_optimizer_states(
            optimizer.buckets,
            room,
            optimizer.bytes_to_place,
            lambda bucket: optimizer.place(bucket, homes.accelerator),
        )
        self._plan_cache(unit_bytes + placed_bytes)
        logger.info(
            "offload: %.3g of %.3g GB are free at the tightest moment; %.3g for units that are prefetched or kept, "
            "%.3g for the optimizer's states of %d of %d buckets, the rest for shards of parameters",
            least_room / GIGA,
            self.recorder.budget_bytes / GIGA,
            unit_bytes / GIGA,
            placed_bytes / GIGA,
            sum(not bucket.home.is_apart for bucket in optimizer.buckets),
            len(optimizer.buckets),
        )

    def _plan_cache(self, taken_bytes: int) -> None:
        """Plan which shards are in the device cache at each moment, in the budget without `taken_bytes`."""
        orders = self._engine.residency.orders
        units = {(phase, number): unit for phase, order in orders.items() for number, unit in enumerate(order.current)}
        self._planned_units = {moment: unit.number for moment, unit in units.items()}
        moments = [*units, UPDATE]
        uses = [_shards_on_host([unit]) for unit in units.values()]
        rooms = [self.recorder.budget_bytes - self.recorder.peaks[moment] - taken_bytes for moment in moments]
        plan = Cycle([*uses, []]).plan(rooms, lambda shard: shard.rest.nbytes)
        self._plan = {moment: CachedShards(*shards) for moment, shards in zip(moments, plan, strict=True)}

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        assert engine is not None
        return engine

    @property
    def _optimizer(self) -> EngineOptimizer:
        """The optimizer whose update is running."""
        optimizer = self._engine.optimizer
        assert optimizer is not None
        return optimizer

    def _axes(self) -> tuple[Axis, Axis]:
        """Return the axes that have all ranks of the model."""
        return self._engine.data, self._optimizer.tensor

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
