"""The reductions that are under way: launched in a group and between groups, and received in the same order.

without groups, in each micro-batch that reduces
    message -> reduce-scatter, in place -> times 1/N -> added to `group_shard`
with groups, in those before the last of a step, and in the last one; in stage 0 each rank is a group
    message -> reduce-scatter in the group, in place -> added to `group_shard`
    message -> the same, + `group_shard` -> reduced between groups, in place -> times 1/N -> `owned`

Between groups, the ranks that own the same elements all-reduce their shards; if they own a part each, they
reduce-scatter them. Sums that a kernel adds up (`Axis.reduce_scatter` in fp32) run on a side stream.

[Note: leaves] If the sum must not depend on the number of ranks, it has a fixed order: a leaf is the gradient of one
micro-batch, in the type of messages, and leaf j N + r is that of micro-batch j on rank r of N.

in each micro-batch                 message -> exchange of shards -> leaf after leaf added to `group_shard`, in fp32
and in the last one of a step       sums of groups -> exchange -> added along a tree -> times 1 / number of leaves, the
                                    only factor -> `owned`

A rank that keeps full gradients has consecutive leaves, and they are added in these; `zero/buckets/leaf_blocks.py`.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis, Work
from zero.buckets.bucket import Bucket
from zero.buckets.grad_shard import GradShard, Held, scale_into
from zero.buckets.leaf_blocks import LeafOrder
from zero.memory.placement import Offload, Placement
from zero.memory.staging import BufferPool
from zero.memory.streams import SideStream
from zero.partition.config import NUM_STAGED, ZeroConfig
from zero.partition.stage import Levels

MAX_IN_FLIGHT = NUM_STAGED - 1  # reductions, beside the bucket that is filling


class ReductionOrder:
    """The order in which buckets are reduced, and the gradients that a backward still expects in each.

    It is the reverse of the layout, on every rank and in every backward. A bucket is complete if no gradient of its
    parameters is expected any more; its turn comes when all before it have been launched.
    """

    def __init__(self, buckets: Sequence[Bucket]):
        """`buckets` are in the order of the layout."""
        self.buckets = list(reversed(buckets))
        self._positions: defaultdict[nn.Parameter, list[int]] = defaultdict(list)  # in `buckets`, in ascending order
        for position, bucket in enumerate(self.buckets):
            for param in bucket.grads.parts:
                self._positions[param].append(position)
        self.numbers = {param: number for number, param in enumerate(self._positions)}
        self._num_launched = 0
        self._expected: list[set[nn.Parameter]] = []  # whose gradients may still arrive in this backward, by position

    def restart(self) -> None:
        """Expect a gradient of every parameter in each of its buckets, none of which is launched."""
        self._num_launched = 0
        self._expected = [set(bucket.grads.parts) for bucket in self.buckets]

    def positions_of(self, param: nn.Parameter) -> Iterator[int]:
        """Yield the positions of the buckets that have elements of a parameter whose gradient has arrived."""
        for position in self._positions[param]:
            if position < self._num_launched:
                raise RuntimeError(f"a gradient of shape {tuple(param.shape)} arrived after its bucket was reduced")
            yield position

    def mark_ready(self, param: nn.Parameter, positions: Iterable[int] | None = None) -> None:
        """Expect no more gradients of a parameter, in some or all of its buckets."""
        for position in self._positions.get(param, ()) if positions is None else positions:
            self._expected[position].discard(param)

    def mark_all_ready(self) -> None:
        """Expect no more gradients."""
        for expected in self._expected[self._num_launched :]:
            expected.clear()

    def take_complete(self) -> Iterator[tuple[int, GradShard]]:
        """Yield (position, gradients) of each complete bucket whose turn has come, and which the caller launches."""
        while self._num_launched < len(self.buckets) and not self._expected[self._num_launched]:
            yield self._num_launched, self.buckets[self._num_launched].grads
            self._num_launched += 1


class Reductions:
    """Reduces buckets, a few at a time, in memory from two pools.

    `staging` has the full gradients and the messages that have no memory of their own. `host_staging` has the owned
    shards on their way to the host, if they are cast, and from there, if there are several micro-batches.
    """

    def __init__(self, buckets: Sequence[Bucket], levels: Levels, config: ZeroConfig, offload: Offload):
        self.levels, self._offload = levels, offload
        self._between_groups, self._sums = SideStream(offload.device), SideStream(offload.device)
        self._in_fp32, self._adds_leaves = config.sum_over_ranks == "fp32", config.policy.adds_leaves
        self.leaves = LeafOrder(config, levels)
        self._max_in_flight = MAX_IN_FLIGHT if config.overlap else 0
        self._in_flight: deque[tuple[GradShard, Work, bool]] = deque()  # (gradients, work, is the last of its step)
        paths = [bucket.grads.path for bucket in buckets]
        counts = Counter(path.types.reduce for path in paths if not path.persists or path.casts_message)
        counts = Counter({dtype: min(n, 1 + self._max_in_flight) for dtype, n in counts.items()})
        allocate = partial(offload.new, Placement.ACCELERATOR, TensorKind.BUFFERS)
        self.staging = BufferPool(allocate, max((len(b.elements) for b in buckets), default=0), counts.elements())
        casts = dict.fromkeys(path.types.accumulate for path in paths if path.casts_for_host)
        self.host_staging = BufferPool(allocate, max((len(b.group_shard) for b in buckets), default=0), casts)

    def write(self, grads: GradShard, param: nn.Parameter, values: Tensor) -> None:
        """Write the elements of a flat gradient that are in one bucket."""
        if grads.staged is None:
            self._make_room()
        grads.write(param, values, self._scale_before(grads), self.staging)

    def launch(self, grads: GradShard, *, is_last: bool) -> None:
        """Reduce the gradients of one bucket, those that are missing as zeros; `is_last`: for the last time in a step.

        Along the inner axis first: then a rank sends only its shard between groups, and only once a step.
        """
        inner, outer = self.levels.inner, self.levels.outer
        receives = inner.takes_receive_buffers or self._adds(inner, grads) or self._adds(outer, grads)
        receives |= self._adds_leaves
        if grads.staged is None or grads.path.casts_message or receives or grads.placement is Placement.HOST:
            self._make_room()
        message = grads.finish(self.staging)
        if self._adds_leaves:
            reduced = inner.exchange(message, partial(self._add_leaves, grads, is_last))
        else:
            reduced = inner.reduce_scatter(message, out=grads.message_shard, in_fp32=self._in_fp32)
        if is_last and grads.path.has_groups and not self._adds_leaves:
            if self._adds(outer, grads):  # allocated on the side stream, no forward could use its memory after `free`
                outer.pairwise.received.prepare(grads.message_shard)
            # Behind the first on a stream of its own: launched by the computation, it would wait for the computation.
            reduced = self._between_groups.launch_after(reduced, partial(self._reduce_between_groups, grads))
        elif self._adds(inner, grads):
            reduced = self._sums.launch_after(reduced, self._sums.device_work)
        self._in_flight.append((grads, reduced, is_last))
        if not self._max_in_flight:
            self._receive_oldest()

    def _reduce_between_groups(self, grads: GradShard) -> Work:
        """Reduce the group's message, with the sum of its earlier micro-batches, in the type of messages."""
        shard, outer = grads.message_shard, self.levels.outer
        if grads.held is Held.SUM:
            with self._sum_on_accelerator(grads, self._between_groups.device_work) as earlier:
                shard.add_(earlier)  # in the type of the sum, and then rounded to that of messages
        adds, has_parts = self._adds(outer, grads), self.levels.num_parts > 1
        if not (adds or has_parts):
            return outer.all_reduce(shard, out=shard)
        part = grads.message_owned if has_parts else shard.chunk(outer.size)[outer.rank]
        reduced = outer.reduce_scatter(shard, out=part, in_fp32=self._in_fp32)
        if not adds:
            return reduced
        # On a stream of its own: behind it on this one, the next bucket's reduction in the group would wait.
        gather = partial(outer.all_gather, part, out=shard)
        return self._sums.launch_after(reduced, self._sums.device_work if has_parts else gather)

    def _adds(self, axis: Axis, grads: GradShard) -> bool:
        """Return whether a kernel adds up what a reduce-scatter of these gradients receives along the axis."""
        return self._in_fp32 and axis.rounds_at_each_rank(grads.path.types.reduce)

    def receive_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._receive_oldest()

    def free(self) -> None:
        """Free the memory of messages and pools, which nothing may use."""
        self.levels.inner.pairwise.received.clear()
        self.levels.outer.pairwise.received.clear()
        self.staging.free()
        self.host_staging.free()

    def let_host_use(self, buckets: Sequence[Bucket]) -> None:
        """Let the host read and write owned shards: it waits for their copies, if some are in its memory."""
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
        is_divided = grads.path.types.reduce is torch.float16 and not self._adds_leaves
        return 1 / math.sqrt(self._num_ranks) if is_divided else 1.0

    def _scale_after(self, grads: GradShard) -> float:
        return 1 / (self._num_ranks * self._scale_before(grads))

    @property
    def _num_ranks(self) -> int:
        return self.levels.inner.size * self.levels.outer.size

    def _receive_oldest(self) -> None:
        """Wait for the oldest reduction, move its result to its owner, and free the staging memory."""
        grads, reduced, is_last = self._in_flight.popleft()
        reduced.wait()
        if not self._adds_leaves:
            self._take(grads, is_last)
        is_mean = is_last and (grads.path.persists or grads.path.has_groups or self._adds_leaves)
        grads.held = Held.MEAN if is_mean else Held.SUM
        grads.unstage(self.staging)

    def _add_leaves(self, grads: GradShard, is_last: bool, terms: Tensor) -> None:
        """Add what the ranks of the group have sent, (ranks, n): leaves, or sums of blocks of them."""
        total, buffer = grads.group_shard, None
        if grads.placement is Placement.HOST:
            buffer = self.host_staging.take(grads.path.types.accumulate)
            total = buffer[: len(grads.group_shard)]
            if grads.held is Held.SUM:
                self._offload.to_accelerator(grads.group_shard, out=total).wait()
        if grads.path.persists:
            grads.accumulate(self.leaves.total(terms), total, 1.0, adds=False)
        else:
            self._add_in_order(grads, terms, total)
        if is_last:
            self._add_groups(grads.blocks.add_to(total))
            total.mul_(self.leaves.factor)
            grads.add_earlier(grads.owned_of(total))
        if buffer is not None:
            grads.host_copy = self._offload.to_host(total, out=grads.group_shard)
            self.host_staging.put_back(buffer, grads.host_copy)

    def _add_in_order(self, grads: GradShard, leaves: Tensor, total: Tensor) -> None:
        """Add leaves, (ranks, n), one after the other, to the sum of their block; at the end blocks to each other."""
        adds = grads.held is Held.SUM
        for rank, leaf in enumerate(leaves.unbind()):
            if self.leaves.begins_block(rank):
                grads.push_block(total)
                adds = False
            # The first one is written: an added zero would turn -0.0 to 0.0.
            grads.accumulate(leaf, total, 1.0, adds=adds)
            adds = True

    def _add_groups(self, total: Tensor) -> None:
        """Add the sums of groups along the tree: each rank a part of the shard, which it owns or sends to replicas."""
        outer = self.levels.outer
        part = total.chunk(outer.size)[outer.rank]
        outer.exchange(total, lambda sums: part.copy_(self.leaves.total(sums))).wait()
        if self.levels.num_parts == 1:
            outer.all_gather(part, out=total).wait()

    def _take(self, grads: GradShard, is_last: bool) -> None:
        """Add a shard of the message to what its owner has, in host memory together with the sum that is there."""
        values, out, scale = grads.message_shard, grads.group_shard, self._scale_after(grads)
        adds, has_groups = grads.held is Held.SUM, grads.path.has_groups
        if has_groups and is_last:
            values, out, adds = grads.message_owned, grads.owned, False  # the message has the sum already
        elif has_groups:
            scale = 1.0
        if grads.placement is Placement.ACCELERATOR:
            grads.accumulate(values, out, scale, adds=adds)
            if is_last:
                grads.add_earlier(out)
            return
        total, cast = values, None
        if grads.path.casts_for_host:
            cast = self.host_staging.take(grads.path.types.accumulate)
            total = cast[: values.numel()]
        scale_into(total, values, scale)
        if adds:
            with self._sum_on_accelerator(grads, Work) as earlier:
                total.add_(earlier)
        if is_last:
            grads.add_earlier(total)
        grads.host_copy = self._offload.to_host(total, out=out)
        if cast is not None:
            self.host_staging.put_back(cast, grads.host_copy)

    @contextmanager
    def _sum_on_accelerator(self, grads: GradShard, last_read: Callable[[], Work]) -> Iterator[Tensor]:
        """Yield the sum of earlier micro-batches, copied from the host if it is there.

        `last_read` returns a `Work` of what this context has launched, unless it is the computation's.
        """
        if grads.placement is Placement.ACCELERATOR:
            yield grads.group_shard
            return
        fetched = self.host_staging.take(grads.path.types.accumulate)
        earlier = fetched[: grads.group_shard.numel()]
        # The sum waits for the copy on the device, and the host waits for nothing.
        self._offload.to_accelerator(grads.group_shard, out=earlier).wait()
        yield earlier
        self.host_staging.put_back(fetched, last_read())
