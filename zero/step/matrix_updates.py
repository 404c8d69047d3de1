"""The update of matrices whose elements many ranks own, bucket by bucket, around two messages there and back.

prepare    of every bucket with matrices: momentum of the owned stretches, whose directions are written to a message
send       launch the message; buckets without matrices are updated while it is on its way
compute    whole matrices, each on one rank; their updates return in the same message
apply      of every bucket with matrices: weight decay and update of the owned stretches
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel.autograd_internals import foreach_copy_
from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Axis
from parallel.tensor.layers import packed_rows, split_dims
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatParameters
from zero.memory.placement import Offload, Placement
from zero.optimizers.atoms import atom_of
from zero.optimizers.matrices import Assignment, Matrix, assign, matrices_of
from zero.optimizers.matrix_optimizer import MatrixOptimizer
from zero.partition.layout import cut
from zero.step.elementwise import Piece
from zero.step.exchange import MatrixExchange, Stretch, join, take_apart

Pieces = Mapping[Bucket, Sequence[Piece]]


class MatrixUpdates:
    """The matrices of an optimizer: those of the groups whose atom is a matrix. Many optimizers have none."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        module: nn.Module,
        flats: Sequence[FlatParameters],
        pieces: Pieces,
        group_of: Mapping[nn.Parameter, int],
        axes: tuple[Axis, Axis],
        offload: Offload,
    ):
        """`pieces`: those of all buckets. `axes`: (shard, tensor); matrices are put together along both."""
        self._inner, self._offload = inner, offload
        self._tensor_axis = axes[1]
        axes = axes if inner.defaults.get("joins_parts", True) else (axes[0], axes[1].without_peers())
        groups = {number for number, group in enumerate(inner.param_groups) if atom_of(inner, group).is_matrix}
        self._groups = groups
        params = {param: number for param, number in group_of.items() if number in groups}
        self._pieces = {bucket: [p for p in own if p.group in groups] for bucket, own in pieces.items()}
        self.other_pieces = {bucket: [p for p in own if p.group not in groups] for bucket, own in pieces.items()}
        self._buckets = {bucket for bucket in pieces if not params.keys().isdisjoint(bucket.grads.parts)}
        self.matrices = _matrices(module, flats, params, axes[1].size)
        flops_of = inner.flops if isinstance(inner, MatrixOptimizer) else lambda _shape: 0
        self.assignment: Assignment = assign(self.matrices, flops_of, axes[0].size, axes[1].size)
        owned = list(_owned(flats, self._pieces))
        self._first_of = {piece: elements.start for piece, _, elements in owned}
        self._exchange = MatrixExchange(self.matrices, self.assignment, [flat.layout for flat in flats], owned, axes)
        self._stretches: defaultdict[Piece, list[Stretch]] = defaultdict(list)
        for piece, stretch in self._exchange.owned:
            self._stretches[piece].append(stretch)
        self._host_message: Tensor | None = None

    def __contains__(self, bucket: Bucket) -> bool:
        """Return whether any rank owns a stretch of a matrix in a bucket: the same on all ranks."""
        return bucket in self._buckets

    @property
    def inner(self) -> MatrixOptimizer:
        """The optimizer, which updates matrices."""
        assert isinstance(self._inner, MatrixOptimizer)
        return self._inner

    def begin(self) -> None:
        """Begin an update: allocate the messages."""
        if not self._buckets:
            return
        for number in self._groups:
            self.inner.start_round(self.inner.param_groups[number])
        numel, dtype, new = self._exchange.by_shard.sent_numel, self.inner.message_dtype, self._offload.new
        self._message = new(Placement.ACCELERATOR, TensorKind.BUFFERS, numel, dtype)
        if self._host_message is None and any(bucket.optimizer_placement is Placement.HOST for bucket in self._buckets):
            self._host_message = new(Placement.HOST, TensorKind.BUFFERS, numel, dtype)

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Update the states of a bucket's owned stretches, and write their directions; `grad` is its flat gradient."""
        for piece in self._pieces[bucket]:
            with allocating(TensorKind.MOMENTS, on_host=bucket.optimizer_placement is Placement.HOST):
                self.inner.prepare(piece.param)
            direction = self.inner.direction(piece.param, cut(grad, piece.elements), self._group(piece))
            stretches, first, message = self._stretches[piece], self._first_of[piece], self._message_of(bucket)
            foreach_copy_(
                [stretch.in_message(message) for stretch in stretches],
                [stretch.runs.view(direction, first) for stretch in stretches],
            )

    def send(self) -> None:
        """Launch the message with the directions of all buckets."""
        if not self._buckets:
            return
        for on_host, on_accelerator in self._copied_from_host():
            self._offload.to_accelerator(on_host, out=on_accelerator).wait()
        with allocating(TensorKind.BUFFERS):
            self._received = self._exchange.by_shard.receive_buffer(self._message)
        self._sent = self._exchange.by_shard.send(self._message, self._received)

    def compute(self) -> None:
        """Compute the matrices of this rank, and return their updates to the owners, and get those of its stretches."""
        if not self._buckets:
            return
        self._sent.wait()
        by_shard, by_tensor = self._exchange.by_shard, self._exchange.by_tensor
        with allocating(TensorKind.BUFFERS):
            parts = self._exchange.gather_parts(self._received)
            del self._received  # freed while the matrices are computed
            wholes = by_tensor.receive_buffer(parts)
            by_tensor.send(parts, wholes).wait()
            for number, own in self._exchange.computed(wholes):
                matrix = self.matrices[number]
                group, state = self.inner.param_groups[matrix.group], self._state_of(number)
                update = self.inner.transform(join(own, matrix.joined_dim), group, state)
                take_apart(update, own, matrix.joined_dim)
            by_tensor.send_back(wholes, parts).wait()
            received = by_shard.receive_buffer(self._message)
            self._exchange.scatter_parts(parts, received)
        by_shard.send_back(received, self._message).wait()
        if (is_kept := self.inner.is_kept(self._message)) is not None:
            self._message.mul_(is_kept)
        for on_host, on_accelerator in self._copied_from_host():
            self._offload.to_host(on_accelerator, out=on_host).wait()
        if self._host_message is not None:
            self._offload.synchronize()  # before the host reads the updates

    def apply(self, bucket: Bucket) -> None:
        """Update the owned stretches of a bucket."""
        for piece in self._pieces[bucket]:
            group, first, message = self._group(piece), self._first_of[piece], self._message_of(bucket)
            self.inner.decay(piece.param, group)
            for stretch in self._stretches[piece]:
                own, update = stretch.runs.view(piece.param, first), stretch.in_message(message)
                self.inner.add(own, update, group, self.matrices[stretch.matrix].whole_shape)

    def end(self) -> None:
        """End an update: free the message on the accelerator."""
        if self._buckets:
            del self._message

    def states(self) -> dict[str, Tensor]:
        """Return the states of the whole matrices of this rank, by name, for a checkpoint; they are made if need be.

        A matrix that each tensor rank has for itself has one for each of them.
        """
        return {
            f"{self._name(number)}.{kind}": value
            for number in self._exchange.own
            for kind, value in self._state_of(number).items()
        }

    def present_states(self) -> list[Tensor]:
        """Return the states of whole matrices that have been made."""
        states = self.inner.matrix_states if self.matrices else {}
        return [value for state in states.values() for value in state.values()]

    @property
    def state_bytes(self) -> float:
        """The bytes of the states of all matrices that the ranks along the shard axis share, on one tensor rank."""
        if not self.matrices:
            return 0
        numels = (self.inner.matrix_state_numel(matrix.whole_shape) / matrix.num_parts for matrix in self.matrices)
        return sum(numels) * self.inner.message_dtype.itemsize

    def sent_numels(self) -> list[int]:
        """Return the number of elements of matrices that each shard rank sends to others in a step."""
        return self._exchange.sent_numels()

    def _state_of(self, number: int) -> dict[str, Tensor]:
        with allocating(TensorKind.MOMENTS):
            return self.inner.state_of_matrix(number, self.matrices[number].whole_shape, self._offload.device)

    def _name(self, number: int) -> str:
        matrix = self.matrices[number]
        position = self._exchange.of_param[matrix.param].index(number)
        part = "" if matrix.num_parts == self._tensor_axis.size else f".{self._tensor_axis.rank}"
        return f"matrix.{matrix.param}.{position}{part}"

    def _group(self, piece: Piece) -> dict:
        return self.inner.param_groups[piece.group]

    def _message_of(self, bucket: Bucket) -> Tensor:
        on_host = bucket.optimizer_placement is Placement.HOST
        return self._host_message if on_host and self._host_message is not None else self._message

    def _copied_from_host(self) -> list[tuple[Tensor, Tensor]]:
        """Return (host memory, accelerator memory) of each part of the message whose stretches are on the host."""
        if self._host_message is None:
            return []
        on_host = [bucket for bucket in self._buckets if bucket.optimizer_placement is Placement.HOST]
        if len(on_host) == len(self._buckets):
            return [(self._host_message, self._message)]
        pieces = [piece for bucket in on_host for piece in self._pieces[bucket]]
        places = [stretch.place for piece in pieces for stretch in self._stretches[piece]]
        return [(cut(self._host_message, place), cut(self._message, place)) for place in places]


def _matrices(
    module: nn.Module, flats: Sequence[FlatParameters], params: Mapping[nn.Parameter, int], tensor_size: int
) -> list[Matrix]:
    """Return the matrices of all parameters, each of which has the number of its group, in the order of the layout."""
    split, packed = split_dims(module), packed_rows(module)
    spans = [item for flat in flats for item in zip(flat.params, flat.layout.spans, strict=True) if item[0] in params]
    return [
        matrix
        for param, span in spans
        for matrix in matrices_of(
            span.name, span.shape, params[param], packed.get(span.name), split.get(span.name), tensor_size
        )
    ]


def _owned(flats: Sequence[FlatParameters], pieces: Pieces) -> Iterator[tuple[Piece, str, range]]:
    """Yield (piece, name of its parameter, elements counted in the parameter), in the order of the layout."""
    for flat in flats:
        for bucket in flat.buckets:
            by_start = {piece.elements.start: piece for piece in pieces.get(bucket, ())}
            for span, part in flat.layout.spans_in(bucket.shard):
                if piece := by_start.get(part.start - bucket.shard.start):
                    start = span.elements.start
                    yield piece, span.name, range(part.start - start, part.stop - start)
