"""The exchanges of an update of matrices, and their messages on the accelerator and on the host.

Matrices are exchanged in two rounds if each rank computes some in both: the first message is short, and the second one
is on its way while the first matrices are computed; the first updates return while the others are computed, and are
applied while the last ones return.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel.memory_kinds import TensorKind, allocating
from zero.core.buckets.bucket import Bucket
from zero.core.partition.layout import cut
from zero.core.protocols.home import Home, Homes
from zero.updates.exchange import MatrixExchange
from zero.updates.matrices import Assignment, Matrix


class Round:
    """An exchange during an update. Its owned stretches are on the accelerator, or in the home of their bucket."""

    def __init__(self, exchange: MatrixExchange, dtype: torch.dtype, homes: Homes):
        self.exchange, self._dtype, self._homes = exchange, dtype, homes
        self.elements = range(exchange.numel)
        self._apart: Tensor | None = None  # pinned, and kept for the whole run
        self._places_apart: Sequence[range] = ()

    def allocate(self, places_apart: Sequence[range]) -> None:
        """Begin an update in which some of the elements are written and read in a home that is apart."""
        self.on_accelerator = self._new(self._homes.accelerator)
        self._places_apart = places_apart
        if places_apart and self._apart is None:
            self._apart = self._new(self._homes.optimizer)

    def of(self, bucket: Bucket) -> Tensor:
        """Return the message in the home in which a bucket is updated."""
        if not bucket.home.is_apart:
            return self.on_accelerator
        assert self._apart is not None
        return self._apart

    def send(self) -> None:
        """Launch the message, after the elements that were written elsewhere have been copied."""
        for apart, here in self._copied():
            self._homes.optimizer.fetch(apart, out=here).wait()
        sent, message = cut(self.on_accelerator, self.exchange.sent_part), self.exchange.by_shard
        with allocating(TensorKind.BUFFERS):
            self._received = message.receive_buffer(sent)
        self._work = message.send(sent, self._received)

    def compute(self, transform: Callable[[list[int], list[Tensor]], None], max_batch: int | None) -> None:
        """Wait for the message, compute the matrices of this rank, and launch the return of their updates."""
        self._work.wait()
        exchange, received = self.exchange, self._received
        with allocating(TensorKind.BUFFERS):
            parts = exchange.gather_parts(received, self.on_accelerator)
            wholes = exchange.by_tensor.receive_buffer(parts)
            exchange.by_tensor.send(parts, wholes).wait()
            for numbers, of_tensor_ranks in exchange.batches(wholes, max_size=max_batch):
                transform(numbers, of_tensor_ranks)
            exchange.by_tensor.send_back(wholes, parts).wait()
            exchange.scatter_parts(parts, received, self.on_accelerator)
        sent = cut(self.on_accelerator, exchange.sent_part)
        self._work = exchange.by_shard.send_back(received, sent)

    def receive(self) -> None:
        """Wait for the updates, which replicas then give to each other, and copy those of another home there."""
        self._work.wait()
        del self._received  # not before: the message reads it
        self.exchange.gather(self.on_accelerator).wait()
        for apart, here in self._copied():
            self._homes.optimizer.store(here, out=apart).wait()
        if self._places_apart:
            self._homes.optimizer.settle()

    def free(self) -> None:
        """End an update: free the message on the accelerator."""
        del self.on_accelerator

    def _copied(self) -> list[tuple[Tensor, Tensor]]:
        if self._apart is None:
            return []
        return [(cut(self._apart, place), cut(self.on_accelerator, place)) for place in self._places_apart]

    def _new(self, home: Home) -> Tensor:
        return home.new(TensorKind.BUFFERS, len(self.elements), self._dtype)


def rounds_of(matrices: Sequence[Matrix], assignment: Assignment) -> list[set[int]]:
    """Divide the numbers of matrices into rounds: kinds with the fewest elements, up to half of all, and the others.

    All are in one round if a rank would compute nothing in one of two: it would wait for two messages and hide none.
    """
    of_kinds: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        of_kinds[matrix.kind].append(number)
    first: set[int] = set()
    for numbers in sorted(of_kinds.values(), key=lambda numbers: len(numbers) * matrices[numbers[0]].numel):
        if 2 * sum(matrices[number].numel for number in (*first, *numbers)) <= sum(m.numel for m in matrices):
            first.update(numbers)
    rounds = [first, set(range(len(matrices))) - first]
    ranks = {rank for rank, _ in assignment.places}
    works_in_both = all({assignment.places[number][0] for number in numbers} == ranks for numbers in rounds)
    return rounds if works_in_both else [set(range(len(matrices)))]
