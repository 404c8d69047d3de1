"""The order in which buckets are reduced, and the gradients that a backward still expects in each.

Buckets are reduced in the reverse of the layout, on every rank and in every backward. A bucket is complete if no
gradient of its parameters is expected any more; its turn comes when all before it have been launched.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from zero.buckets.bucket import Bucket, GradShard


class ReductionOrder:
    """The buckets of a backward in the order of their reductions: those that are launched, and what is expected."""

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
