"""The update of matrices whose elements many ranks own, bucket by bucket, around messages there and back.

prepare    of every bucket with matrices: momentum of the owned stretches, whose directions are written to a message
send       launch the messages; buckets without matrices are updated while they are on their way
compute    whole matrices, each on one rank, and equal ones in one batch; their updates return in the same messages
returned   of every bucket with matrices: `apply` weight decay and update of the owned stretches

Matrices are exchanged in two rounds if each rank computes some in both: the first message is short, and the second one
is on its way while the first matrices are computed; the first updates return while the others are computed, and are
applied while the last ones return.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, allocating
from zero.buckets.bucket import Bucket
from zero.memory.placement import Offload, Placement
from zero.optimizers.exchange import MatrixExchange, join, take_apart
from zero.optimizers.matrices import Assignment, Matrix, assign, near_owners
from zero.optimizers.matrix_method import WholeMatrixMethod
from zero.optimizers.owned_matrices import OwnedMatrices
from zero.partition.layout import cut
from zero.step.assembled_updates import Axes
from zero.step.pieces import OwnedPieces


class Round:
    """An exchange during an update. Its owned stretches are on the accelerator, and on the host for buckets there."""

    def __init__(self, exchange: MatrixExchange, dtype: torch.dtype, offload: Offload):
        self.exchange, self._dtype, self._offload = exchange, dtype, offload
        self.elements = range(exchange.numel)
        self._on_host: Tensor | None = None  # pinned, and kept for the whole run
        self._places_on_host: Sequence[range] = ()

    def allocate(self, places_on_host: Sequence[range]) -> None:
        """Begin an update in which some of the elements are written and read on the host."""
        self.on_accelerator = self._new(Placement.ACCELERATOR)
        self._places_on_host = places_on_host
        if places_on_host and self._on_host is None:
            self._on_host = self._new(Placement.HOST)

    def of(self, bucket: Bucket) -> Tensor:
        """Return the message in the memory in which a bucket is updated."""
        if bucket.optimizer_placement is Placement.ACCELERATOR:
            return self.on_accelerator
        assert self._on_host is not None
        return self._on_host

    def send(self) -> None:
        """Launch the message, after the elements that the host has written have been copied."""
        for on_host, on_accelerator in self._copied():
            self._offload.to_accelerator(on_host, out=on_accelerator).wait()
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
        """Wait for the updates, which replicas then give to each other, and copy those of the host to it."""
        self._work.wait()
        del self._received  # not before: the message reads it
        self.exchange.gather(self.on_accelerator).wait()
        for on_host, on_accelerator in self._copied():
            self._offload.to_host(on_accelerator, out=on_host).wait()
        if self._places_on_host:
            self._offload.synchronize()

    def free(self) -> None:
        """End an update: free the message on the accelerator."""
        del self.on_accelerator

    def _copied(self) -> list[tuple[Tensor, Tensor]]:
        if self._on_host is None:
            return []
        return [(cut(self._on_host, place), cut(self.on_accelerator, place)) for place in self._places_on_host]

    def _new(self, placement: Placement) -> Tensor:
        return self._offload.new(placement, TensorKind.BUFFERS, len(self.elements), self._dtype)


class MatrixUpdates(OwnedMatrices):
    """The updates of matrices that are put together, each on one rank."""

    inner: WholeMatrixMethod
    how = "whole"

    def __init__(
        self,
        inner: WholeMatrixMethod,
        groups: Set[int],
        module: nn.Module,
        pieces: OwnedPieces,
        axes: Axes,
        offload: Offload,
        *,
        one_by_one: bool,
    ):
        """Plan the messages; `axes`: (shard, replica, tensor), over all of which matrices are divided."""
        shard, replica, tensor = axes
        super().__init__(inner, groups, module, pieces, tensor, offload.device)
        self._max_batch = 1 if one_by_one else None  # matrices that are computed as one batch
        # States of whole matrices are saved by one of the replicas, which then has to have all of them. The parts of
        # replicas are as long as the longest one: with fewer matrices than ranks they would be mostly padding.
        is_divided = not inner.matrix_state_bytes((1, 1)) and len(self.matrices) >= shard.size * replica.size
        divided = replica if is_divided else replica.without_peers()
        even = assign(self.matrices, self.flops_of, shard.size * divided.size, self.tensor.size)
        self.assignment = near_owners(even, self.matrices, self.flops_of, self.layouts, shard.size)
        own = [piece for of_bucket in self.pieces.values() for piece in of_bucket]
        divided_axes = shard, divided, self.tensor
        self._rounds = [
            Round(
                MatrixExchange(self.matrices, chosen, self.assignment, self.layouts, own, divided_axes),
                inner.message_dtype,
                offload,
            )
            for chosen in rounds_of(self.matrices, self.assignment)
        ]

    def begin(self) -> None:
        """Begin an update: allocate the messages."""
        super().begin()
        on_host = [bucket for bucket in self.buckets if bucket.optimizer_placement is Placement.HOST]
        pieces = [piece for bucket in on_host for piece in self.pieces[bucket]]
        for one in self._rounds:
            places = [stretch.place for piece in pieces for stretch in one.exchange.stretches[piece]]
            one.allocate(places if len(on_host) < len(self.buckets) else [one.elements])

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Update the states of a bucket's owned stretches, and write their directions; `grad` is its flat gradient."""
        for piece in self.pieces[bucket]:
            with allocating(TensorKind.MOMENTS, on_host=bucket.optimizer_placement is Placement.HOST):
                self.inner.prepare(piece.param)
            own, group = cut(grad, piece.elements), self.group_of(piece)
            for one in self._rounds:
                for stretch in one.exchange.stretches[piece]:
                    # Also if another replica computes the matrix: it overwrites these elements by its update.
                    out = stretch.in_message(one.of(bucket))
                    self.inner.direction(piece.param, own, group, stretch.runs.view, out)

    def send(self) -> None:
        """Launch the messages with the directions of all buckets."""
        for one in self._rounds:
            one.send()

    def compute(self) -> None:
        """Compute the matrices of this rank, and return their updates."""
        for one in self._rounds:
            one.compute(self._transform, self._max_batch)

    def returned(self) -> Iterator[bool]:
        """Wait for the updates of one round after the other; yield True if it is the last one."""
        for one in self._rounds:
            one.receive()
            self._present = one
            yield one is self._rounds[-1]

    def apply(self, bucket: Bucket) -> None:
        """Update the owned stretches of a bucket whose updates have returned."""
        for piece in self.pieces[bucket]:
            group = self.group_of(piece)
            for stretch in self._present.exchange.stretches[piece]:
                own, update = stretch.runs.view(piece.param), stretch.in_message(self._present.of(bucket))
                self.inner.add(own, update, group, self.matrices[stretch.matrix].whole_shape)

    def end(self) -> None:
        """End an update: free the messages on the accelerator."""
        for one in self._rounds:
            one.free()
        self.inner.end_round()

    @property
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank computes."""
        return [number for one in self._rounds for number in one.exchange.own]

    def sent_numels(self) -> list[int]:
        """Return the number of elements of matrices that each data rank sends to other shard ranks in a step."""
        return [sum(numels) for numels in zip(*(one.exchange.sent_numels() for one in self._rounds), strict=True)]

    def _transform(self, numbers: list[int], parts: list[Tensor]) -> None:
        matrix = self.matrices[numbers[0]]
        wholes = join(parts, matrix.joined_dim)
        states = [self.state_of(number) for number in numbers]
        self.inner.transform(wholes, self.inner.param_groups[matrix.group], states)
        take_apart(wholes, parts, matrix.joined_dim)


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
