"""The reductions that are under way: launched in one order, and received in the same order.

    message -> the transport of the bucket reduces it -> the sum of its gradients

The message is described in bucket_gradient.py, the sum in zero/core/protocols/gradient_sum.py, and what a transport
sends in its file.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import nn

from parallel.memory_kinds import TensorKind
from parallel.mesh import Work
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.bucket_gradient import BucketGradient
from zero.core.memory.staging import BufferPool
from zero.core.partition.config import NUM_STAGED
from zero.core.protocols.home import Homes
from zero.core.protocols.transport import Transport

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

    def take_complete(self) -> Iterator[tuple[int, BucketGradient]]:
        """Yield (position, gradients) of each complete bucket whose turn has come, and which the caller launches."""
        while self._num_launched < len(self.buckets) and not self._expected[self._num_launched]:
            yield self._num_launched, self.buckets[self._num_launched].grads
            self._num_launched += 1


class Reductions:
    """Reduces buckets, a few at a time unless none of them `overlaps` with the next one.

    `staging` has the full gradients and the messages that have no memory of their own. `transports` are all of these
    buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], transports: Sequence[Transport], homes: Homes, *, overlaps: bool):
        self.transports, self._homes = transports, homes
        self._max_in_flight = MAX_IN_FLIGHT if overlaps else 0
        self._in_flight: deque[tuple[BucketGradient, Work]] = deque()
        paths = [bucket.grads.path for bucket in buckets]
        counts = Counter(path.types.reduce for path in paths if not path.persists or path.casts_message)
        counts = Counter({dtype: min(n, 1 + self._max_in_flight) for dtype, n in counts.items()})
        allocate = partial(homes.accelerator.new, TensorKind.BUFFERS)
        self.staging = BufferPool(
            allocate, max((len(b.ranges.elements) for b in buckets), default=0), counts.elements()
        )
        homes.optimizer.reserve(max((len(b.ranges.rest) for b in buckets), default=0), paths)

    def launch(self, grads: BucketGradient, *, is_last: bool) -> None:
        """Reduce the gradients of one bucket, those that are missing as zeros; `is_last`: of a step."""
        # Older reductions hold memory that is needed now, or have copies to the host that can run by now. They are
        # waited for here, and not when a bucket begins to fill: these are the same places on all ranks, and a wait may
        # launch messages. With NCCL and persistent full gradients the computation waits for none before backward ends.
        while grads.holds_memory and len(self._in_flight) >= max(1, self._max_in_flight):
            self._receive_oldest()
        message = grads.finish(self.staging)
        self._in_flight.append((grads, grads.transport.reduce(message, grads.total, is_last=is_last)))
        if not self._max_in_flight:
            self._receive_oldest()

    def receive_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._receive_oldest()

    def free(self) -> None:
        """Free the memory of messages and pools, which nothing may use."""
        for transport in self.transports:
            transport.close()
        self.staging.free()
        for home in self._homes.all:
            home.free()

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Let the devices of their homes read and write sums of gradients, once these are copied there."""
        for home in {bucket.grads.home for bucket in buckets}:
            home.settle()

    def _receive_oldest(self) -> None:
        """Wait for the oldest reduction, which ends in its sum, and free the staging memory."""
        grads, reduced = self._in_flight.popleft()
        reduced.wait()
        grads.unstage(self.staging)
