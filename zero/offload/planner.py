"""What stays on the accelerator beyond what must: placement within a budget, learnt while training (Gemini).

first steps     everything that may be on the host is; nothing is fetched ahead. At every visit of a unit the meter says
                what was occupied since the visit before: activations, buffers, the parameters in use. The first step
                shows whether the budget can be kept, before its update; the second, by which all buffers are there,
                what is left
then            room = budget - occupied, at each visit. Units that are fetched ahead come first, then shards of
                parameters, needed twice a micro-batch, then the optimizer's states, needed once a step
from then on    at each visit shards stay while there is room for them: those that are used soonest
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch

from parallel.errors import ConfigError
from parallel.instruments.memory_tracker import PeakMeter
from parallel.mesh import Axis
from zero.flat import FlatParameters
from zero.offload.chunks import Cycle
from zero.offload.placement import Offload, Placement
from zero.unit import Unit

if TYPE_CHECKING:
    from zero.optimizer import ZeroOptimizer

logger = logging.getLogger(__name__)

Phase = Literal["forward", "backward", "update"]
Moment = tuple[Phase, int]  # the visit of a unit, counted from the beginning of its phase
Chunk = tuple[FlatParameters, int]  # a bucket

UPDATE: Moment = ("update", 0)  # and all that is between an update and the first visit
NOTHING: tuple[frozenset[Chunk], frozenset[Chunk]] = (frozenset(), frozenset())
GIGA = 1e9
SHARE_WITHOUT_BUDGET = 0.9  # of the accelerator, for auto: CUDA and NCCL need some too
NUM_RECORDED = 2  # steps
NUM_KEPT = 2  # units from forward to backward


class Residency:
    """`prefetch_numel` and `may_keep` are how far ahead units may be gathered, and whether any stay from forward to
    backward. With `auto` both are off until it is known that there is room."""

    def __init__(self, offload: Offload, prefetch_numel: int):
        self._offload, self._wished_prefetch_numel = offload, prefetch_numel
        self._adapts = offload.config.mode == "auto"
        self._budget_bytes = _budget_bytes(offload)
        self._num_steps_to_record = NUM_RECORDED if self._budget_bytes is not None else 0
        self._meter = PeakMeter(offload.device)
        self._moment = UPDATE
        self._peaks: defaultdict[Moment, int] = defaultdict(int)
        self._route: dict[tuple[Moment, Unit], None] = {}
        self._num_visits: dict[Phase, int] = {}
        self._visited: dict[Moment, Unit] = {}
        self._plan: dict[Moment, tuple[frozenset[Chunk], frozenset[Chunk]]] = {}
        self._near: set[Chunk] = set()
        self._has_strayed = False  # from the recorded route, in this step
        self.prefetch_numel = 0 if self._adapts else prefetch_numel
        self.may_keep = not self._adapts

    @property
    def _is_recording(self) -> bool:
        return self._num_steps_to_record > 0

    def check_units(self, units: Iterable[Unit], staging_bytes: int) -> None:
        """Raises ConfigError where the budget is too small for any step: for the two largest units, one inside the
        other, and the gradients on their way."""
        if self._budget_bytes is None:
            return
        num_bytes = [sum(flat.full.element_size() * flat.full.numel() for flat in unit.flats) for unit in units]
        least = sum(sorted(num_bytes)[-2:]) + staging_bytes
        if least > self._budget_bytes:
            raise ConfigError(
                f"offload.accelerator_memory_gb={self._budget_bytes / GIGA:g} is too small: the parameters of two "
                f"units and staged gradients alone take {least / GIGA:.6g}, {(least - self._budget_bytes) / GIGA:.6g} "
                "more; choose zero.stage=3, smaller zero.units or zero.bucket_numel, or a larger parallel.tensor_size"
            )

    def restart(self) -> None:
        """A forward begins."""
        if not self._peaks:  # the first: what was needed to build the model is gone
            self._meter.restart()
        self._num_visits = {"forward": 0, "backward": 0}

    def before_visit(self, unit: Unit, phase: Phase) -> None:
        """A unit is about to be gathered: what it and its computation need is free from now on."""
        if not self._adapts and not self._is_recording:
            return
        moment = phase, self._num_visits.get(phase, 0)
        self._num_visits[phase] = moment[1] + 1
        self._enter(moment)
        if self._is_recording:
            self._route[moment, unit] = None
        else:
            self._has_strayed |= self._visited.get(moment) is not unit
            self._let_go_all_but(self._planned()[0])

    def after_visit(self, unit: Unit) -> None:
        """The unit's parameters are there: their shards may stay."""
        _, staying = self._planned()
        self._let_go_all_but(staying)
        for flat, index in _chunks_on_host([unit]) if staying else ():
            if (flat, index) in staying and (flat, index) not in self._near:
                flat.bring_near(index)
                self._near.add((flat, index))

    def before_update(self, axes: Iterable[Axis]) -> None:
        """Raises ConfigError where the first forward and backward have needed more than the budget."""
        self._enter(UPDATE)
        if self._is_recording:
            self._check_budget(axes)
        self._let_go_all_but(self._planned()[0])

    def after_update(self, optimizer: "ZeroOptimizer", axes: Iterable[Axis]) -> None:
        self._has_strayed = False
        if self._is_recording:
            self._enter(UPDATE)
            least_room = self._check_budget(axes)
            self._num_steps_to_record -= 1
            if self._num_steps_to_record:
                self._peaks.clear()
            elif self._adapts:
                self._share_out(least_room, optimizer)

    def _enter(self, moment: Moment) -> None:
        if self._is_recording:
            self._peaks[self._moment] = max(self._peaks[self._moment], self._meter.peak_bytes())
            self._meter.restart()
        self._moment = moment

    def _check_budget(self, axes: Iterable[Axis]) -> int:
        """The least room of all moments and ranks."""
        assert self._budget_bytes is not None
        tightest = max(self._peaks, key=lambda moment: self._peaks[moment])
        least_room = int(self._budget_bytes - self._peaks[tightest])
        for axis in axes:
            least_room = axis.least(least_room)
        if least_room < 0:
            raise ConfigError(
                f"offload.accelerator_memory_gb={self._budget_bytes / GIGA:g} cannot be kept: this rank needs "
                f"{self._peaks[tightest] / GIGA:.6g} in {' visit '.join(map(str, tightest))}, the neediest "
                f"{-least_room / GIGA:.6g} too much; offload more, store fewer activations, or take a smaller "
                "train.micro_batch_size"
            )
        return least_room

    def _share_out(self, least_room: int, optimizer: "ZeroOptimizer") -> None:
        assert self._budget_bytes is not None
        units = list(dict.fromkeys(unit for _, unit in self._route))
        itemsize = max((flat.full.element_size() for unit in units for flat in unit.flats), default=1)
        all_numel = sum(unit.transient_numel for unit in units)
        ahead_bytes = min(min(self._wished_prefetch_numel, all_numel) * itemsize, least_room // 2)
        if ahead_bytes >= max((unit.transient_numel for unit in units), default=0) * itemsize:
            self.prefetch_numel = ahead_bytes // itemsize
        kept = [unit for (phase, _), unit in self._route if phase == "backward"][:NUM_KEPT]
        kept_bytes = sum(unit.transient_numel for unit in kept) * itemsize
        reserved = self.prefetch_numel * itemsize
        self.may_keep = kept_bytes <= least_room - reserved
        reserved += kept_bytes * self.may_keep
        shard_bytes = sum(map(_num_bytes, _chunks_on_host(units)))
        placed_bytes = _place(optimizer, least_room - reserved - shard_bytes)
        self._visited = dict(self._route.keys())
        rooms = {moment: self._budget_bytes - peak - reserved - placed_bytes for moment, peak in self._peaks.items()}
        moments = [*self._visited, UPDATE]
        cycle = Cycle([_chunks_on_host([self._visited[m]] if m in self._visited else []) for m in moments])
        plan = cycle.plan([rooms[moment] for moment in moments], _num_bytes)
        self._plan = dict(zip(moments, plan, strict=True))
        logger.info(
            "offload: %.3g of %.3g GB are free at the tightest moment; %.3g for units fetched ahead or kept, %.3g for "
            "the optimizer's states of %d of %d buckets, the rest for shards of parameters",
            least_room / GIGA,
            self._budget_bytes / GIGA,
            reserved / GIGA,
            placed_bytes / GIGA,
            sum(bucket.placement is Placement.ACCELERATOR for bucket in optimizer.buckets),
            len(optimizer.buckets),
        )

    def _planned(self) -> tuple[frozenset[Chunk], frozenset[Chunk]]:
        """What of the shards stays when the present moment begins, and when its own have come."""
        return NOTHING if self._has_strayed else self._plan.get(self._moment, NOTHING)

    def _let_go_all_but(self, staying: frozenset[Chunk]) -> None:
        for flat, index in self._near - staying:
            flat.let_go(index)
        self._near &= staying


def _budget_bytes(offload: Offload) -> float | None:
    """None: nothing to keep to. Raises ConfigError where auto has nothing to go by."""
    config = offload.config
    if config.accelerator_memory_gb is not None:
        return config.accelerator_memory_gb * GIGA
    if config.mode != "auto":
        return None
    if offload.device.type != "cuda":
        raise ConfigError(
            f"offload.mode=auto on {offload.device.type} has no accelerator to fill; set offload.accelerator_memory_gb"
        )
    return SHARE_WITHOUT_BUDGET * torch.cuda.get_device_properties(offload.device).total_memory


def _place(optimizer: "ZeroOptimizer", room_bytes: float) -> int:
    """Bring the states of as many buckets to the accelerator as fit; returns their bytes."""
    used = cast = 0
    for bucket in optimizer.buckets:
        if bucket.placement is Placement.HOST:
            if bucket.gradient.dtype != bucket.master.dtype:
                cast = max(cast, bucket.master.nbytes)
            num_bytes = optimizer.bytes_to_place(bucket)
            if used + num_bytes + cast > room_bytes:
                break
            used += num_bytes
            optimizer.place(bucket, Placement.ACCELERATOR)
    return used + cast if used else 0


def _chunks_on_host(units: Iterable[Unit]) -> list[Chunk]:
    flats = [flat for unit in units for flat in unit.flats if flat.placement is Placement.HOST]
    return [(flat, index) for flat in flats for index in range(len(flat.owned))]


def _num_bytes(chunk: Chunk) -> int:
    flat, index = chunk
    return flat.owned[index].nbytes
