"""Full gradients on their way to their owners.

autograd -> param.grad -> staged bucket -> reduce-scatter, in place -> times 1/N: owned shard, the mean over ranks

If full gradients persist, every bucket has staging memory of its own for the whole run; the owned shard is a part of it
(stage 1: 4 + 12/N bytes a parameter), or separate memory if it is on the host. If they are transient, a bucket takes
staging memory from a small pool when its first gradient arrives, and the owned shard always has separate memory (stage
2: 2 + 14/N). The pool and the owned shards on the accelerator are allocated for the whole run (M_D), or only while they
hold gradients. These figures are those of gradients in half precision. Sums of micro-batches in fp32 take 2 bytes more
for each element that is summed: of the full gradients if they persist, else of the owned shard. Full gradients that
persist are cast into a block of the pool before a message of another type.

A bucket may be reduced once all of its gradients have arrived. Buckets are reduced in one fixed order, the reverse of
the layout, on every rank and in every backward: the order in which gradients arrive never changes a message or a sum,
and neither does `overlap`, which only decides when a launched reduction is waited for.
"""

import math
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, tagged
from parallel.mesh import Axis, Handle
from zero.buckets.bucket import Bucket, GradShard, Staging, scale_into
from zero.memory.placement import Offload, Placement
from zero.memory.staging import StagingPool
from zero.memory.streams import SideStream
from zero.order.agreement import LaunchOrder
from zero.order.step_order import Round
from zero.partition.config import NUM_STAGED
from zero.partition.stage import Lifetime, ShardingPolicy

MAX_RANKS_IN_HALF = 64  # NCCL adds in the type of the message, and rounds at every rank
MAX_IN_FLIGHT = NUM_STAGED - 1  # reductions, beside the bucket that is filling


class BackwardState(Enum):
    """The state of the reducer between two gradients."""

    NONE = "no backward is running"
    ACCUMULATING = "gradients are added up in full; the last backward of the step reduces them"
    REDUCING = "each bucket is reduced as soon as it is complete and its turn has come"


class GradientReducer:
    """Takes gradients into their buckets and reduces each bucket to the shards of its owners.

    To close a parameter is to expect no further gradient of it in this backward. It is closed when its gradient
    arrives, if full parameters persist, else when the scheduler closes its unit.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        axes: tuple[Axis, Axis],
        policy: ShardingPolicy,
        overlap: bool,
        launch_order: LaunchOrder,
        offload: Offload,
    ):
        """`buckets`: those of the trainable parameters, in the order of the layout. `axes`: (shard, replica)."""
        (self._shard_axis, self._replica_axis), self._policy = axes, policy
        self._warn_of_rounding(buckets)
        self._num_ranks = self._shard_axis.size * self._replica_axis.size
        self._closes_on_arrival = policy.full_params is Lifetime.PERSISTENT
        self._launch_order, self._offload = launch_order, offload
        self._between_axes = SideStream(offload.device)
        self._overlaps, self._max_in_flight = overlap, MAX_IN_FLIGHT if overlap else 0
        self._order = list(reversed(buckets))
        self._positions: defaultdict[nn.Parameter, list[int]] = defaultdict(list)  # in the order of reductions
        for position, bucket in enumerate(self._order):
            for param in bucket.grads.parts:
                self._positions[param].append(position)
        block_numel = max((len(bucket.elements) for bucket in buckets), default=0)
        num_blocks = Counter(b.grads.types.reduce for b in buckets if b.grads.takes_block)
        num_blocks = Counter({dtype: min(n, 1 + self._max_in_flight) for dtype, n in num_blocks.items()})
        self.staging = StagingPool(block_numel, num_blocks, offload)
        shard_numel = max((len(bucket.shard) for bucket in buckets), default=0)
        # Owned shards on their way to the host, if they are cast, and from there, if there are several micro-batches.
        casts = {b.grads.types.accumulate: 1 for b in buckets if b.grads.is_cast_for_host}
        self.host_staging = StagingPool(shard_numel, casts, offload)
        self._backward = BackwardState.NONE
        self._num_launched = 0
        self._in_flight: deque[tuple[GradShard, Handle]] = deque()
        self.last_backward_has_begun = False  # of this step
        # An optimizer that is no longer referenced awaits nothing.
        self.params_of: WeakKeyDictionary[Any, frozenset[nn.Parameter]] = WeakKeyDictionary()  # by optimizer
        self._awaiting: WeakSet[Any] = WeakSet()  # optimizers that have not used the gradients of the last backward

    @property
    def holds_gradients(self) -> bool:
        """True if gradients have arrived since the last update, reduced or not."""
        return any(b.grads.holds_gradient or b.grads.staging is not Staging.FREE for b in self._order)

    def reduces(self, is_last: bool) -> bool:
        """Return whether a backward reduces gradients; `is_last`: it is the last one of its step."""
        return is_last or self._policy.full_grads is Lifetime.TRANSIENT

    def begin(self, is_last: bool) -> None:
        """Begin a backward, which expects a gradient of every parameter.

        Raises ValueError if the backward before did not end, or if it was the last of its step.
        """
        if self._backward is BackwardState.REDUCING:
            raise ValueError("the backward before this one broke off; call `optimizer.zero_grad()` before the next one")
        held = [bucket.grads for bucket in self._order if bucket.grads.persists and bucket.grads.holds_gradient]
        reduced = [grads for grads in held if not grads.is_set_aside]
        if reduced and len(self._awaiting) == len(self.params_of):
            raise ValueError(
                "a second backward after the gradients were reduced; run every backward of a step but the last "
                "inside `with model.accumulate():`"
            )
        for grads in reduced:  # one of several optimizers has stepped: the gradients of the others are added up
            grads.set_aside()
        for bucket in self._order:
            bucket.grads.expected = set(bucket.grads.parts)
        self._awaiting = WeakSet(self.params_of)
        # Last of all: a backward that is refused must not leave anything to end.
        self._num_launched = 0
        self._backward = BackwardState.REDUCING if self.reduces(is_last) else BackwardState.ACCUMULATING
        self.last_backward_has_begun = is_last
        self._launch_order.start(Round.BACKWARD if self.reduces(is_last) else Round.ACCUMULATION)

    def complete(self) -> None:
        """Reduce the gradients of a step whose last backward has not run, or reached no parameter on this rank."""
        if not self.last_backward_has_begun:
            self.begin(is_last=True)
            self.end()
        self._launch_order.before_step()

    def accept(self, param: nn.Parameter, grad: Tensor) -> None:
        """Write a gradient to the buckets in which the parameter has elements, in the order of reduction."""
        if grad.is_sparse:
            raise ValueError(
                f"sparse gradients are not supported: parameter of shape {tuple(param.shape)}; set sparse=False in its "
                "nn.Embedding"
            )
        tagged(TensorKind.GRADIENTS, grad)
        # torch's optimizers, too, update a complex parameter as pairs of real numbers.
        grad = (torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad).reshape(-1)
        numel = stop = grad.numel()
        for position in self._positions[param]:
            if position < self._num_launched:
                raise RuntimeError(f"a gradient of shape {tuple(param.shape)} arrived after its bucket was reduced")
            grads = self._order[position].grads
            start = stop - len(grads.parts[param])
            if grads.needs_block:
                self._make_room()
            part = grad[start:stop] if stop - start < numel else grad
            grads.write(param, part, self._scale_before(grads), self.staging)
            stop = start
            if self._closes_on_arrival:
                grads.expected.discard(param)
                # At once, before the parameter's next bucket is filled: a parameter may be larger than the pool.
                self._launch_complete()

    def close_at_end(self) -> None:
        """Close no parameter before the end of backward, from now on: a parameter may get several gradients in one."""
        self._closes_on_arrival = False

    def close(self, params: Iterable[nn.Parameter]) -> None:
        """Expect no more gradients of `params` in this backward; a gradient that never arrived counts as zero."""
        for param in params:
            for position in self._positions.get(param, ()):
                self._order[position].grads.expected.discard(param)
        self._launch_complete()

    def end(self) -> None:
        """End a backward: if it reduces, every bucket reaches its owners."""
        if self._backward is BackwardState.REDUCING:
            self.close(self._positions)
            while self._in_flight:
                self._receive_oldest()
            # Only now: no message and no staged gradient is left that needs the memory.
            if self._policy.owned_grads is Lifetime.TRANSIENT:
                self._shard_axis.received.clear()
                self.staging.free()
                self.host_staging.free()
        self._backward = BackwardState.NONE

    def register(self, optimizer: Any, params: frozenset[nn.Parameter]) -> None:
        """Let gradients wait for `optimizer`, which is the only one to use those of `params`.

        Raises ValueError if a parameter is in another optimizer.
        """
        for other in self.params_of.values():
            for param in other & params:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in two optimizers of this model; leave it in one of "
                    "them, or delete the other optimizer first"
                )
        self.params_of[optimizer] = params
        self._awaiting.add(optimizer)

    def release(self, optimizer: Any) -> bool:
        """Discard the gradients that an optimizer has used; all of them if no other one awaits its own.

        Return whether all were discarded.
        """
        self._awaiting.discard(optimizer)
        if not self._awaiting:
            self.clear()
            return True
        self.end()
        if any(bucket.grads.placement is Placement.HOST for bucket in self._order):
            self._offload.synchronize()  # before the host overwrites gradients
        for bucket in self._order:
            bucket.grads.discard(self.params_of[optimizer])
        return False

    def clear(self) -> None:
        """Discard all gradients, reduced or not: the next backward starts from nothing."""
        # A backward that broke off is ended first: by then ranks may have launched different numbers of reductions.
        self.end()
        self._num_launched, self.last_backward_has_begun = 0, False
        for bucket in self._order:
            bucket.grads.unstage(self.staging)
            bucket.grads.free_owned()

    def _warn_of_rounding(self, buckets: Sequence[Bucket]) -> None:
        """Warn, on the first rank of the axes, if NCCL adds the gradients of many ranks in half precision."""
        types = {bucket.grads.types.reduce for bucket in buckets} & {torch.float16, torch.bfloat16}
        axes = self._shard_axis, self._replica_axis
        size = max((axis.size for axis in axes if axis.backend == "nccl"), default=1)
        if types and size > MAX_RANKS_IN_HALF and not any(axis.rank for axis in axes):
            warnings.warn(
                f"NCCL sums the gradients of {size} ranks in {types.pop()}, and rounds at each of them; choose "
                "ZeroConfig.reduce_dtype=fp32, with twice the traffic of gradients",
                stacklevel=4,
            )

    def _launch_complete(self) -> None:
        if self._backward is not BackwardState.REDUCING:
            return
        while self._num_launched < len(self._order) and not self._order[self._num_launched].grads.expected:
            self._launch_order.before_reduction(self._num_launched)
            self._launch(self._order[self._num_launched].grads)
            self._num_launched += 1

    def _launch(self, grads: GradShard) -> None:
        takes_memory = grads.needs_block or grads.casts_message or self._shard_axis.takes_receive_buffers
        if takes_memory or grads.placement is Placement.HOST:
            self._make_room()
        message, shard = grads.finish(self.staging), grads.message_shard
        # Along the shard axis first: the all-reduce between replicas then moves 1/N of the bucket only.
        reduced = self._shard_axis.reduce_scatter(message, out=shard)
        if self._replica_axis.size > 1:
            # Behind the first on a stream of its own: launched by the computation, it would wait for the computation.
            all_reduce = partial(self._replica_axis.all_reduce, shard, out=shard)
            reduced = self._between_axes.launch_after(reduced, all_reduce)
        self._in_flight.append((grads, reduced))
        if not self._overlaps:
            self._receive_oldest()

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
        return 1 / math.sqrt(self._num_ranks) if grads.types.reduce is torch.float16 else 1.0

    def _scale_after(self, grads: GradShard) -> float:
        return 1 / (self._num_ranks * self._scale_before(grads))

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
        dtype, numel = grads.types.accumulate, shard.numel()
        block = None
        if grads.is_cast_for_host:
            block = self.host_staging.take(dtype)
            total = block[:numel]
        scale_into(total, shard, self._scale_after(grads))
        if grads.holds_gradient:
            fetched = self.host_staging.take(dtype)
            earlier = fetched[:numel]
            # The sum waits for the copy on the device, and the host waits for nothing.
            self._offload.to_accelerator(grads.owned, out=earlier).wait()
            total.add_(earlier)
            self.host_staging.put_back(fetched, Handle())
        grads.host_copy = self._offload.to_host(total, out=grads.owned)
        if block is not None:
            self.host_staging.put_back(block, grads.host_copy)
