"""Full gradients on their way to their owners.

autograd -> param.grad -> staged bucket, averaged over ranks -> reduce-scatter -> owned shard

Where full gradients persist, every bucket is staged for good and the owned shard is a part of it (4 + 12/N bytes a
parameter). Where they are transient, a bucket is staged when its first gradient arrives, in memory from a small pool,
and the owned shard lies apart (2 + 14/N); so it does where it is placed on the host. The pool and the owned shards stay
for good (M_D), or come and go with the gradients.

A bucket may go when its last gradient has come. Buckets go in one fixed order, the reverse of the layout, on every rank
and in every backward: which gradients came first never changes a message or a sum, and neither does `overlap`, which
only decides when a launched reduction is waited for.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel.instruments.memory_tracker import TensorKind, tagged
from parallel.mesh import Axis, Handle
from zero.flat import FlatParameters, free_storage, restore_storage
from zero.layout import Bucket, cut
from zero.offload.placement import Offload, Placement
from zero.stage import Lifetime, ShardingPolicy

MAX_IN_FLIGHT = 2  # reductions, hence staged buckets beyond those still filling


@dataclass(eq=False)
class BucketGradient:
    """One bucket's gradients: `staged` while full, `owned` (this rank's shard, the mean over ranks) once reduced."""

    bucket: Bucket
    parts: dict[nn.Parameter, range]  # where in the buffer each parameter's share of this bucket lies
    gaps: list[range]
    dtype: torch.dtype
    owned: Tensor = field(init=False)
    placement: Placement = Placement.ACCELERATOR  # of `owned`
    left: Handle = field(default_factory=Handle)  # `staged` has been copied to the host
    position: int = 0  # in the order of reductions
    staged: Tensor | None = None  # at least as long as the bucket
    is_reduced: bool = False  # `owned` holds a gradient
    waiting: set[nn.Parameter] = field(default_factory=set)  # no gradient yet in this backward
    blank: set[nn.Parameter] = field(default_factory=set)  # nothing written to `staged` yet

    def part_of_staged(self, elements: range) -> Tensor:
        assert self.staged is not None
        return cut(self.staged, elements, self.bucket.elements.start)

    def clear_staged(self) -> None:
        """What has no gradient yet is overwritten by the first that comes; gaps, which get none, are zero."""
        self.blank = set(self.parts)
        for gap in self.gaps:
            self.part_of_staged(gap).zero_()


class GradientReducer:
    def __init__(
        self,
        flats: list[FlatParameters],
        axes: tuple[Axis, Axis],
        policy: ShardingPolicy,
        overlap: bool,
        before_launch: Callable[[int], None],
        offload: Offload,
    ):
        self._offload, (self._shard_axis, self._replica_axis) = offload, axes
        self._scale = 1 / (self._shard_axis.size * self._replica_axis.size)
        self._lifetime, self._owned_lifetime = policy.full_grads, policy.owned_grads
        self._before_launch = before_launch
        self._max_in_flight = MAX_IN_FLIGHT if overlap else 0
        self.buckets = {flat: self._buckets_of(flat) for flat in flats}
        self._order = [bucket for buckets in reversed(self.buckets.values()) for bucket in reversed(buckets)]
        self._touched_by: defaultdict[nn.Parameter, list[BucketGradient]] = defaultdict(list)
        for position, gradient in enumerate(self._order):
            gradient.position = position
            for param in gradient.parts:
                self._touched_by[param].append(gradient)
        self._staging_numel = max((len(w.bucket.elements) for w in self._order), default=0)
        self._pool: defaultdict[torch.dtype, deque[tuple[Tensor, Handle]]] = defaultdict(deque)
        self._earlier: dict[torch.dtype, Tensor] = {}  # an owned shard back from the host, to be added to
        self._num_staging_bytes = 0
        if self._lifetime is Lifetime.TRANSIENT:
            self._fill_pool()
        self._num_launched = 0
        self._must_finish = False  # a backward that reduces has begun and not ended
        self.is_complete = False  # the last backward of this step has begun
        self._in_flight: deque[tuple[BucketGradient, Tensor, Handle]] = deque()

    def begin(self, *, may_launch: bool, completes: bool) -> None:
        """A backward starts: every parameter is expected once. Raises ValueError where the last one was not ended.

        `completes`: no other backward of this step needs to follow.
        """
        if self._must_finish:
            raise ValueError("the backward before this one broke off; call `optimizer.zero_grad()` before the next")
        for gradient in self._order:
            if gradient.is_reduced and self._lifetime is Lifetime.PERSISTENT:
                raise ValueError(
                    "a second backward after the gradients were reduced; run every backward of a step but the last "
                    "inside `with model.accumulate():`"
                )
            gradient.waiting = set(gradient.parts)
        self._num_launched, self._must_finish = 0, may_launch  # not before: a refused backward leaves nothing to end
        self.is_complete |= completes

    def accept(self, param: nn.Parameter, grad: Tensor, *, closes: bool, may_launch: bool) -> None:
        """Take a gradient into the buckets that the parameter lies in, the last of them first.

        `closes`: those buckets need not wait for the parameter any longer, as after `close`.
        """
        if grad.is_sparse:
            raise ValueError(f"sparse gradients are not supported: parameter of shape {tuple(param.shape)}")
        grad = tagged(TensorKind.GRADIENTS, grad).reshape(-1)
        stop = grad.numel()
        for gradient in self._touched_by[param]:
            if gradient.position < self._num_launched:
                raise RuntimeError(f"a gradient of shape {tuple(param.shape)} came after its bucket was reduced")
            elements = gradient.parts[param]
            self._stage(gradient)
            arrived, staged = grad[stop - len(elements) : stop], gradient.part_of_staged(elements)
            stop -= len(elements)
            if param in gradient.blank:
                torch.mul(arrived, self._scale, out=staged)
                gradient.blank.discard(param)
            else:
                staged.add_(arrived, alpha=self._scale)
            if closes:
                gradient.waiting.discard(param)
                if may_launch:
                    self._launch_complete_buckets()

    def close(self, params: Iterable[nn.Parameter], *, may_launch: bool) -> None:
        """No more gradients will come for `params`; where none came, it counts as zero."""
        for param in params:
            for gradient in self._touched_by.get(param, []):
                gradient.waiting.discard(param)
        if may_launch:
            self._launch_complete_buckets()

    def finish(self) -> None:
        """Close everything; every bucket reaches its owners."""
        self.close(self._touched_by, may_launch=True)
        while self._in_flight:
            self._land_oldest()
        self._must_finish = False
        if self._owned_lifetime is Lifetime.TRANSIENT:
            self._free_pool()

    def clear(self) -> None:
        """Forget all gradients, reduced or not: the next backward starts from nothing.

        A backward that broke off is ended first: ranks may have launched different numbers of its buckets by then.
        """
        if self._must_finish:
            self.finish()
        self._num_launched, self.is_complete = 0, False
        for gradient in self._order:
            gradient.is_reduced = False
            if gradient.staged is not None:
                self._unstage(gradient)
            self._free_owned(gradient)

    @property
    def staging_bytes(self) -> int:
        """Memory of the pool for transient buckets, when all of it is in use."""
        return self._num_staging_bytes

    def resident_tensors(self, placement: Placement) -> list[Tensor]:
        """Gradients that stay in one of the memories: full buckets where they persist, and owned shards."""
        resident = [gradient.owned for gradient in self._order if gradient.placement is placement]
        if self._lifetime is Lifetime.PERSISTENT and placement is Placement.ACCELERATOR:
            resident += [gradient.staged for gradient in self._order if gradient.staged is not None]
        return resident

    def bytes_to_place(self, gradient: BucketGradient) -> int:
        """What the owned shard takes on the accelerator; where full gradients persist it is a part of them."""
        return 0 if self._lifetime is Lifetime.PERSISTENT else gradient.owned.nbytes

    def place(self, gradient: BucketGradient, placement: Placement) -> None:
        """The owned shard is in that memory from now on; a gradient that it held is void."""
        shard = gradient.bucket.shard(self._shard_axis.rank)
        gradient.placement = placement
        if self._lifetime is Lifetime.PERSISTENT and placement is Placement.ACCELERATOR:
            gradient.owned = gradient.part_of_staged(shard)
        else:
            gradient.owned = self._offload.new(placement, TensorKind.GRADIENTS, len(shard), gradient.dtype).zero_()
            self._free_owned(gradient)

    def _buckets_of(self, flat: FlatParameters) -> list[BucketGradient]:
        layout, dtype = flat.layout, flat.full.dtype
        param_of = dict(zip(layout.spans, flat.params, strict=True))
        gradients = []
        for bucket in layout.buckets:
            parts = {param_of[span]: part for span, part in layout.pieces(bucket.elements)}
            gradient = BucketGradient(bucket, parts, list(layout.gaps(bucket.elements)), dtype)
            if self._lifetime is Lifetime.PERSISTENT:
                gradient.staged = self._new(TensorKind.GRADIENTS, len(bucket.elements), dtype)
                gradient.clear_staged()
            self.place(gradient, self._offload.config.placement_of("optimizer"))
            gradients.append(gradient)
        return gradients

    def _launch_complete_buckets(self) -> None:
        while self._num_launched < len(self._order) and not self._order[self._num_launched].waiting:
            self._before_launch(self._num_launched)
            self._launch(self._order[self._num_launched])
            self._num_launched += 1

    def _launch(self, gradient: BucketGradient) -> None:
        self._stage(gradient)
        bucket = gradient.bucket
        staged = gradient.part_of_staged(bucket.elements)
        for param in gradient.blank:
            gradient.part_of_staged(gradient.parts[param]).zero_()
        shard = gradient.part_of_staged(bucket.shard(self._shard_axis.rank))
        scattered = self._shard_axis.reduce_scatter(staged, out=shard)
        reduced = scattered.then(lambda: self._replica_axis.all_reduce(shard, out=shard))
        self._in_flight.append((gradient, shard, reduced))
        while len(self._in_flight) > self._max_in_flight:
            self._land_oldest()

    def _land_oldest(self) -> None:
        gradient, shard, reduced = self._in_flight.popleft()
        reduced.wait()
        if not gradient.is_reduced and self._frees(gradient):
            restore_storage(gradient.owned)
        if gradient.placement is Placement.HOST:
            self._send_to_host(gradient, shard)
        elif self._lifetime is Lifetime.TRANSIENT:
            gradient.owned.add_(shard) if gradient.is_reduced else gradient.owned.copy_(shard)
        if self._lifetime is Lifetime.TRANSIENT:
            self._unstage(gradient)
        gradient.is_reduced = True

    def _send_to_host(self, gradient: BucketGradient, shard: Tensor) -> None:
        """What earlier micro-batches left there comes back to be added to: the host waits for nothing."""
        if gradient.is_reduced:
            if shard.dtype not in self._earlier:
                numel = self._staging_numel // self._shard_axis.size
                self._earlier[shard.dtype] = self._new(TensorKind.BUFFERS, numel, shard.dtype)
            earlier = self._earlier[shard.dtype][: shard.numel()]
            self._offload.to_accelerator(gradient.owned, out=earlier).wait()
            shard.add_(earlier)
        gradient.left = self._offload.to_host(shard, out=gradient.owned)

    def _free_owned(self, gradient: BucketGradient) -> None:
        if self._frees(gradient):
            free_storage(gradient.owned)

    def _frees(self, gradient: BucketGradient) -> bool:
        """Whether the owned shard has memory of its own, and only while it holds a gradient. Pinned memory stays."""
        is_apart = self._lifetime is Lifetime.TRANSIENT and gradient.placement is Placement.ACCELERATOR
        return is_apart and self._owned_lifetime is Lifetime.TRANSIENT

    def _stage(self, gradient: BucketGradient) -> None:
        if gradient.staged is None:
            gradient.staged = self._take_from_pool(gradient.dtype)
            gradient.clear_staged()

    def _unstage(self, gradient: BucketGradient) -> None:
        """The bucket's full gradients are void; memory that does not persist goes back to the pool."""
        assert gradient.staged is not None
        if self._lifetime is Lifetime.TRANSIENT:
            self._pool[gradient.dtype].append((gradient.staged, gradient.left))
            gradient.staged = None
        else:
            gradient.clear_staged()

    def _take_from_pool(self, dtype: torch.dtype) -> Tensor:
        """Memory for any bucket of this type. One bucket fills while others travel: the pool has a few at most."""
        if not self._pool[dtype]:
            return self._new_block(dtype)
        block, left = self._pool[dtype].popleft()
        left.wait()
        restore_storage(block)
        return block

    def _new_block(self, dtype: torch.dtype) -> Tensor:
        self._num_staging_bytes += self._staging_numel * dtype.itemsize
        return self._new(TensorKind.BUFFERS, self._staging_numel, dtype)

    def _new(self, kind: TensorKind, numel: int, dtype: torch.dtype) -> Tensor:
        return self._offload.new(Placement.ACCELERATOR, kind, numel, dtype)

    def _fill_pool(self) -> None:
        """Enough where gradients come in the order of the layout; early, before activations fragment the memory."""
        for dtype, num_buckets in Counter(gradient.dtype for gradient in self._order).items():
            num_blocks = min(num_buckets, 1 + self._max_in_flight)
            self._pool[dtype].extend((self._new_block(dtype), Handle()) for _ in range(num_blocks))

    def _free_pool(self) -> None:
        """Until the next backward."""
        self._shard_axis.received.clear()
        for blocks in self._pool.values():
            for block, left in blocks:
                left.wait()
                free_storage(block)
