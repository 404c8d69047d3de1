"""Transports: how parameters and gradients go between the ranks that own a bucket and all that compute with it.

Parameters and gradients of a bucket are sent by its transport alone; beside it, the engine broadcasts initial values.
A transport is described once, for all parameters or for some of them. An engine opens a copy of the description, and
binds a copy of that to each bucket. Copies are shallow: what `__init__` makes is shared by all engines, what `open`
makes by the buckets of one, and what `bind` makes belongs to a bucket.

    parameters    own of each owner -- publish, once an update --> rest -- gather, whenever they are used --> full
    gradients     message, of all elements -- reduce, in each micro-batch that reduces --> the sum, of rest or own

`elements`, `rest` and `own` are the ranges of zero/core/partition/layout.py. `Direct` and `AllReduce` are plain ZeRO
and plain data parallelism; other transports are in zero/transports/.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from parallel.mesh import Axis, Work
from zero.core.memory.streams import SideStream
from zero.core.partition.layout import Ranges, Slice

if TYPE_CHECKING:
    from zero.core.protocols.gradient_sum import GradientSum

MAX_RANKS_IN_HALF = 64  # NCCL adds in the type of the message, and rounds at every rank


class Transport:
    """The messages of the buckets of some parameters; the ranks of `axis` call all methods in the same order.

    A method launches on the current stream and returns a `Work`, which is waited for once. Those of `reduce` are waited
    for on the computation's stream, in the order of launches; those of `gather` and `publish` on any stream and in any
    order, so that their waits launch no message. `gather` and `publish` may be called on a side stream: they allocate
    nothing, because memory returns to the stream that has allocated it.

    `open`, `close` and the checks are called on the engine's copy, everything else on those of buckets.
    """

    axis: Axis
    """All ranks that compute with the same parameters: the first one has their initial values."""
    gathered_along: Axis
    """The ranks that have all elements of a bucket together, each what it keeps at rest."""
    owners: Axis
    """The ranks that own all elements of a bucket together; rank r is rank r % S of the S ranks of `gathered_along`."""
    replicas: Axis
    """The ranks that own the same elements as this one."""
    counted: Axis
    """The ranks along which squares of own gradients are added to the norm of these parameters: the owners, and ranks
    that hold different parameters of the same kind, such as other experts."""
    reduced_along: tuple[Axis, ...]
    """The axes of the messages of gradients, whose receive buffers `close` frees."""
    num_ranks: int
    """The divisor of a sum of gradients: the ranks whose losses make up the mean."""
    stages: Collection[int] = (1, 2, 3)
    """The stages whose division of states is that of this transport: 0 if every rank owns everything, else 1 to 3."""
    gives_means = True
    """False if only the last reduction of a step gives a mean over ranks, by `set_mean` or `summed_here` of the sum."""
    is_rank_invariant = False
    """True if the sum of gradients has the same bits on any number of ranks; the norm then has too."""
    is_lossy = False
    """True if other ranks get parameters with fewer digits, by a gather that is given `room`."""
    room_itemsize = 0
    """The bytes of `room` for an element, until the wait of a gather."""
    ranges: Ranges
    """Of the bucket, once it is bound."""
    _sums: SideStream
    """Where kernels add up what was received, once it is opened."""

    def __init__(self, axis: Axis, *, num_ranks: int | None = None, counted: Axis | None = None, in_fp32: bool = False):
        """`in_fp32`: messages in half precision are added in fp32 and rounded once, over any backend."""
        self.axis, self.num_ranks, self.in_fp32 = axis, num_ranks or axis.size, in_fp32
        self.gathered_along = self.owners = axis
        self.counted, self.replicas = counted or axis, axis.without_peers()
        self.reduced_along = (axis,)

    @property
    def name(self) -> str:
        """The name of the transport in errors."""
        return f"{type(self).__name__}({self.axis.name})"

    @property
    def num_shards(self) -> int:
        """The number of shards of a bucket: each rank keeps one."""
        return self.gathered_along.size

    @property
    def num_parts(self) -> int:
        """The number of parts of a shard: each rank owns one."""
        return self.owners.size // self.num_shards

    def grain(self, alignment: int) -> int:
        """Return the number of elements of which every bucket has a multiple."""
        return self.num_shards * self.num_parts * alignment

    def open(self, device: torch.device, *, keeps_full: bool) -> Self:
        """Return a copy for one engine, with streams and counters that its buckets share.

        `keeps_full`: full gradients persist, and are reduced once a step.
        """
        opened = copy(self)
        opened._sums = SideStream(device)
        return opened

    def bind(self, ranges: Ranges, slices: Sequence[Slice] = ()) -> Self:
        """Return a copy for one bucket, with memory of its own; `slices` are the parts of parameters in the bucket."""
        bound = copy(self)
        bound.ranges = ranges
        return bound

    # Parameters

    def publish(self, own: Tensor, rest: Tensor) -> Work:
        """Send updated parameters to all ranks that keep them; `own` is a view of `rest`. Not called if they are equal.

        Wait before anything else reads or writes `rest`.
        """
        raise NotImplementedError

    def room(self, full: Tensor) -> Tensor | None:
        """Allocate the memory of a gather that may lose digits; None: this transport loses none.

        Called on the stream that waits for the gather, to which the memory returns.
        """
        return None

    def gather(self, rest: Tensor, full: Tensor, room: Tensor | None = None) -> Work:
        """Fill `full`, of any type, with what all ranks have at rest; `rest` may be its own place in `full`.

        Without `room` no digit is lost.
        """
        raise NotImplementedError

    def round_trip(self, values: Tensor, elements: range) -> None:
        """Replace values of some elements of the bucket by those that other ranks get of them."""

    def own_changed(self, owned: Iterable[tuple[Slice, Tensor]]) -> None:
        """Note what this rank owns of all buckets, with new values; all ranks call it before the next lossy gather."""

    # Gradients

    def scale(self, dtype: torch.dtype) -> float:
        """Return the factor by which gradients are multiplied when they are written to a message of this type.

        fp16 holds 5e-8 to 65504: a sum over many ranks may overflow, and a term of their mean may become zero.
        """
        return self.num_ranks**-0.5 if dtype is torch.float16 else 1.0

    def factor(self, dtype: torch.dtype) -> float:
        """Return the factor that makes the sum of messages a mean over ranks. The product of both factors is 1/N."""
        return 1 / (self.num_ranks * self.scale(dtype))

    def begin_backward(self, number: int, num_micro_batches: int | None) -> bool:
        """Note backward `number`, from 1 on, of a step of this many, if it is known.

        Return True if full gradients that persist begin anew in it: `keep` is called with those of before.
        """
        return False

    def keep(self, full: Tensor) -> None:
        """Keep full gradients of earlier micro-batches, which are overwritten afterwards."""
        raise NotImplementedError

    def holds_memory(self, dtype: torch.dtype) -> bool:
        """Return whether a reduction holds memory as long as its message, or its wait launches messages.

        An older reduction is then waited for before the next one is launched, at the same places on all ranks.
        """
        return any(axis.takes_receive_buffers or self._adds(axis, dtype) for axis in self.reduced_along)

    def reduce(self, message: Tensor, total: "GradientSum", *, is_last: bool) -> Work:
        """Launch the reduction of a bucket's full gradients, which may be overwritten; its wait gives them to `total`.

        `is_last`: of a step, after which `total` has the mean. Nothing else reads or writes `total` meanwhile. If full
        gradients persist, `total.rest` may be a part of `message`.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget gradients of the present step: called after each step, and when a bucket is made or moved.

        What is kept from step to step, such as the error of compressed gradients, is not forgotten.
        """

    def close(self) -> None:
        """Free memory that an engine's buckets share, and that is held between steps only to save allocations."""
        for axis in self.reduced_along:
            axis.pairwise.received.clear()

    def check_several_gradients(self) -> None:
        """Raise ValueError if several gradients of a parameter in one backward may be rounded apart."""

    def check_missing_backward(self) -> None:
        """Raise ValueError if a step cannot end whose last backward reached no parameter."""

    def rounding_warning(self, dtype: torch.dtype) -> str | None:
        """Return a warning, on the first rank, if NCCL adds many messages of this type and rounds at each rank."""
        sizes = [axis.size for axis in self.reduced_along if axis.rounds_at_each_rank(dtype)]
        adds_itself, is_first = (
            self.in_fp32 or self.is_rank_invariant,
            not any(axis.rank for axis in self.reduced_along),
        )
        if adds_itself or not is_first or max(sizes, default=1) <= MAX_RANKS_IN_HALF:
            return None
        return (
            f"NCCL sums the gradients of {max(sizes)} ranks in {dtype}, and rounds at each of them; choose "
            "ZeroConfig.sum_over_ranks=fp32 with groups of ranks, or reduce_dtype=fp32 with twice the traffic"
        )

    def _adds(self, axis: Axis, dtype: torch.dtype) -> bool:
        """Return whether a kernel adds up what a reduction in this type receives along the axis."""
        return self.in_fp32 and axis.rounds_at_each_rank(dtype)


class Direct(Transport):
    """The ranks of an axis divide each bucket: a reduce-scatter and an all-gather for each (paper, section 5)."""

    def gather(self, rest: Tensor, full: Tensor, room: Tensor | None = None) -> Work:
        return self.axis.all_gather(rest, out=full)

    def reduce(self, message: Tensor, total: "GradientSum", *, is_last: bool) -> Work:
        own = self.ranges.of_bucket(message, self.ranges.own)
        reduced = self.axis.reduce_scatter(message, out=own, in_fp32=self.in_fp32)
        if self._adds(self.axis, message.dtype):
            reduced = self._sums.launch_after(reduced, self._sums.device_work)
        return after(reduced, partial(total.add, own, self.factor(message.dtype), is_last=is_last))


class AllReduce(Transport):
    """Every rank of an axis has all of a bucket and its states: an all-reduce for each."""

    stages = (0,)

    def __init__(self, axis: Axis, *, num_ranks: int | None = None, counted: Axis | None = None, in_fp32: bool = False):
        alone = axis.without_peers()
        super().__init__(axis, num_ranks=num_ranks, counted=counted or alone, in_fp32=in_fp32)
        self.gathered_along = self.owners = alone
        self.replicas = axis

    def grain(self, alignment: int) -> int:
        return math.lcm(alignment, self.axis.size if self.in_fp32 else 1)  # in fp32 it begins with a reduce-scatter

    def holds_memory(self, dtype: torch.dtype) -> bool:
        return self._adds(self.axis, dtype)

    def gather(self, rest: Tensor, full: Tensor, room: Tensor | None = None) -> Work:
        full.copy_(rest)  # returns early if both are the same memory
        return Work()

    def reduce(self, message: Tensor, total: "GradientSum", *, is_last: bool) -> Work:
        reduced = all_reduce(self.axis, message, self._sums, in_fp32=self._adds(self.axis, message.dtype))
        return after(reduced, partial(total.add, message, self.factor(message.dtype), is_last=is_last))


TransportOf = Callable[[str, nn.Parameter], Transport]
"""The transport of each parameter, given its name."""


def all_reduce(axis: Axis, message: Tensor, sums: SideStream, *, in_fp32: bool) -> Work:
    """All-reduce a message in place; `in_fp32`: by a reduce-scatter whose sums run on `sums`, and an all-gather."""
    if not in_fp32:
        return axis.all_reduce(message, out=message)
    part = message.chunk(axis.size)[axis.rank]
    reduced = axis.reduce_scatter(message, out=part, in_fp32=True)
    return sums.launch_after(reduced, partial(axis.all_gather, part, out=message))


def after(work: Work, step: Callable[[], object]) -> Work:
    """Return a `Work` on `work` and a step that reads its result, on the stream that waits."""
    return Work(work.wait, step)
