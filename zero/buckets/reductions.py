"""The reductions that are under way: launched along the shard axis and between replicas, received in the same order.

message -> reduce-scatter, in place -> all-reduce of the shard between replicas -> times 1/N -> owned shard
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallel.mesh import Axis, Handle
from zero.buckets.bucket import Bucket, GradShard, scale_into
from zero.memory.placement import Offload, Placement
from zero.memory.staging import StagingPool
from zero.memory.streams import SideStream
from zero.partition.config import NUM_STAGED

MAX_IN_FLIGHT = NUM_STAGED - 1  # reductions, beside the bucket that is filling


class Reductions:
    """Reduces buckets, a few at a time, in memory from two pools.

    `staging` has the full gradients and the messages that have no memory of their own. `host_staging` has the owned
    shards on their way to the host, if they are cast, and from there, if there are several micro-batches.
    """

    def __init__(self, buckets: Sequence[Bucket], axes: tuple[Axis, Axis], overlap: bool, offload: Offload):
        """`axes`: (shard, replica). Without `overlap` each reduction is waited for at once."""
        self.axes, self._offload = axes, offload
        self._between_axes = SideStream(offload.device)
        self._max_in_flight = MAX_IN_FLIGHT if overlap else 0
        self._in_flight: deque[tuple[GradShard, Handle]] = deque()
        paths = [bucket.grads.path for bucket in buckets]
        counts = Counter(path.types.reduce for path in paths if not path.persists or path.casts_message)
        counts = Counter({dtype: min(n, 1 + self._max_in_flight) for dtype, n in counts.items()})
        self.staging = StagingPool(max((len(b.elements) for b in buckets), default=0), counts, offload)
        casts = {path.types.accumulate: 1 for path in paths if path.casts_for_host}
        self.host_staging = StagingPool(max((len(b.shard) for b in buckets), default=0), casts, offload)

    def write(self, grads: GradShard, param: nn.Parameter, values: Tensor) -> None:
        """Write the elements of a flat gradient that are in one bucket."""
        if grads.staged is None:
            self._make_room()
        grads.write(param, values, self._scale_before(grads), self.staging)

    def launch(self, grads: GradShard) -> None:
        """Reduce the gradients of one bucket, those that are missing as zeros."""
        shard_axis, replica_axis = self.axes
        takes_memory = grads.staged is None or grads.path.casts_message or shard_axis.takes_receive_buffers
        if takes_memory or grads.placement is Placement.HOST:
            self._make_room()
        message, shard = grads.finish(self.staging), grads.message_shard
        # Along the shard axis first: the all-reduce between replicas then moves 1/N of the bucket only.
        reduced = shard_axis.reduce_scatter(message, out=shard)
        if replica_axis.size > 1:
            # Behind the first on a stream of its own: launched by the computation, it would wait for the computation.
            all_reduce = partial(replica_axis.all_reduce, shard, out=shard)
            reduced = self._between_axes.launch_after(reduced, all_reduce)
        self._in_flight.append((grads, reduced))
        if not self._max_in_flight:
            self._receive_oldest()

    def receive_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._receive_oldest()

    def free(self) -> None:
        """Free the memory of messages and pools, which nothing may use."""
        self.axes[0].received.clear()
        self.staging.free()
        self.host_staging.free()

    def allow_host_writes(self, buckets: Sequence[Bucket]) -> None:
        """Let the host overwrite owned shards: it waits for their copies, if some are in its memory."""
        if any(bucket.grads.placement is Placement.HOST for bucket in buckets):
            self._offload.synchronize()

    def _make_room(self) -> None:
        """Wait for old reductions, which hold memory that is needed now, or whose copies to the host can run by now.

        With NCCL and persistent full gradients the computation waits for no reduction before backward ends.
        """
        while len(self._in_flight) > self._max_in_flight:
            self._receive_oldest()

    def _scale_before(self, grads: GradShard) -> float:
        """Return the factor of gradients before their reduction. The product of both factors is 1/N.

        fp16 holds 5e-8 to 65504: a sum over many ranks may overflow, and a term of their mean may become zero.
        """
        return 1 / math.sqrt(self._num_ranks) if grads.path.types.reduce is torch.float16 else 1.0

    def _scale_after(self, grads: GradShard) -> float:
        return 1 / (self._num_ranks * self._scale_before(grads))

    @property
    def _num_ranks(self) -> int:
        return self.axes[0].size * self.axes[1].size

    def _receive_oldest(self) -> None:
        """Wait for the oldest reduction, move its result to the owned shard, and free the staging memory."""
        grads, reduced = self._in_flight.popleft()
        reduced.wait()
        if grads.placement is Placement.HOST:
            self._send_to_host(grads)
        else:
            grads.accumulate(self._scale_after(grads))
        grads.holds_gradient, grads.is_set_aside = True, False
        grads.unstage(self.staging)

    def _send_to_host(self, grads: GradShard) -> None:
        """Copy the reduced shard to the host; add it, on the accelerator, to what earlier micro-batches left there."""
        shard = total = grads.message_shard
        dtype, numel = grads.path.types.accumulate, shard.numel()
        cast = None
        if grads.path.casts_for_host:
            cast = self.host_staging.take(dtype)
            total = cast[:numel]
        scale_into(total, shard, self._scale_after(grads))
        if grads.holds_gradient:
            fetched = self.host_staging.take(dtype)
            earlier = fetched[:numel]
            # The sum waits for the copy on the device, and the host waits for nothing.
            self._offload.to_accelerator(grads.owned, out=earlier).wait()
            total.add_(earlier)
            self.host_staging.put_back(fetched, Handle())
        grads.host_copy = self._offload.to_host(total, out=grads.owned)
        if cast is not None:
            self.host_staging.put_back(cast, grads.host_copy)
