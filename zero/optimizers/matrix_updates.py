"""The update of matrices whose elements many ranks own, bucket by bucket, around two messages there and back.

prepare    of every bucket with matrices: momentum of the owned stretches, whose directions are written to a message
send       launch the message; buckets without matrices are updated while it is on its way
compute    whole matrices, each on one rank; their updates return in the same message
apply      of every bucket with matrices: weight decay and update of the owned stretches
"""

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from parallel.autograd_internals import foreach_copy_
from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Axis
from parallel.tensor.split_parameters import packed_rows, split_dims
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatParameters
from zero.memory.placement import Offload, Placement
from zero.optimizers.exchange import MatrixExchange, Message, join, take_apart
from zero.optimizers.matrices import Assignment, Matrix, assign, matrices_of
from zero.optimizers.matrix_method import MatrixMethod
from zero.partition.layout import cut
from zero.step.assembled_updates import AssembledUpdates
from zero.step.pieces import OwnedPieces, Piece


class StretchMessage:
    """The message of owned stretches during an update: on the accelerator, and on the host for buckets there."""

    def __init__(self, message: Message, dtype: torch.dtype, offload: Offload):
        self._message, self._dtype, self._offload = message, dtype, offload
        self.elements = range(sum(message.sent_numels))
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
        with allocating(TensorKind.BUFFERS):
            self._received = self._message.receive_buffer(self.on_accelerator)
        self._sent = self._message.send(self.on_accelerator, self._received)

    def receive(self) -> Tensor:
        """Wait for the message, and return the elements that this rank has received; the caller frees them."""
        self._sent.wait()
        received = self._received
        del self._received
        return received

    def to_host(self) -> None:
        """Copy the updates that have returned to the host, which may read them afterwards."""
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


class MatrixUpdates(AssembledUpdates):
    """The matrices in some groups of an optimizer, of which there is at least one."""

    def __init__(
        self,
        inner: MatrixMethod,
        groups: Set[int],
        module: nn.Module,
        pieces: OwnedPieces,
        axes: tuple[Axis, Axis],
        offload: Offload,
    ):
        """Plan the messages; `axes`: (shard, tensor), along both of which matrices are put together."""
        self.inner, self._groups, self._offload, self._tensor_axis = inner, groups, offload, axes[1]
        shard, tensor = axes if inner.defaults.get("joins_parts", True) else (axes[0], axes[1].without_peers())
        params = {param: number for param, number in pieces.group_of.items() if number in groups}
        owned = pieces.by_bucket.items()
        self._pieces = {bucket: [piece for piece in own if piece.group in groups] for bucket, own in owned}
        self.other_pieces = {bucket: [piece for piece in own if piece.group not in groups] for bucket, own in owned}
        self.buckets = {bucket for bucket in pieces.by_bucket if not params.keys().isdisjoint(bucket.grads.parts)}
        """The buckets in which any rank owns a stretch of a matrix: the same on all ranks."""
        matrices = _matrices(module, pieces.flats, params, tensor.size)
        assignment = assign(matrices, inner.flops, shard.size, tensor.size)
        layouts = [flat.layout for flat in pieces.flats]
        own = [piece for of_bucket in self._pieces.values() for piece in of_bucket]
        self._exchange = MatrixExchange(matrices, assignment, layouts, own, (shard, tensor))
        self._message = StretchMessage(self._exchange.by_shard, inner.message_dtype, offload)

    @property
    def matrices(self) -> Sequence[Matrix]:
        """All matrices, in the order of the layout."""
        return self._exchange.matrices

    @property
    def assignment(self) -> Assignment:
        """The rank that computes each matrix."""
        return self._exchange.assignment

    def begin(self) -> None:
        """Begin an update: allocate the messages."""
        for number in self._groups:
            self.inner.start_round(self.inner.param_groups[number])
        on_host = [bucket for bucket in self.buckets if bucket.optimizer_placement is Placement.HOST]
        pieces = [piece for bucket in on_host for piece in self._pieces[bucket]]
        places = [stretch.place for piece in pieces for stretch in self._exchange.stretches[piece]]
        self._message.allocate(places if len(on_host) < len(self.buckets) else [self._message.elements])

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Update the states of a bucket's owned stretches, and write their directions; `grad` is its flat gradient."""
        for piece in self._pieces[bucket]:
            with allocating(TensorKind.MOMENTS, on_host=bucket.optimizer_placement is Placement.HOST):
                self.inner.prepare(piece.param)
            direction = self.inner.direction(piece.param, cut(grad, piece.elements), self._group(piece))
            stretches, message = self._exchange.stretches[piece], self._message.of(bucket)
            foreach_copy_(
                [stretch.in_message(message) for stretch in stretches],
                [stretch.runs.view(direction) for stretch in stretches],
            )

    def send(self) -> None:
        """Launch the message with the directions of all buckets."""
        self._message.send()

    def compute(self) -> None:
        """Compute the matrices of this rank, return their updates, and receive the updates of its stretches."""
        message, by_shard, by_tensor = self._message, self._exchange.by_shard, self._exchange.by_tensor
        with allocating(TensorKind.BUFFERS):
            parts = self._exchange.gather_parts(message.receive())
            wholes = by_tensor.receive_buffer(parts)
            by_tensor.send(parts, wholes).wait()
            for number, own in self._exchange.computed(wholes):
                matrix = self.matrices[number]
                group, state = self.inner.param_groups[matrix.group], self._state_of(number)
                update = self.inner.transform(join(own, matrix.joined_dim), group, state)
                take_apart(update, own, matrix.joined_dim)
            by_tensor.send_back(wholes, parts).wait()
            received = by_shard.receive_buffer(message.on_accelerator)
            self._exchange.scatter_parts(parts, received)
        by_shard.send_back(received, message.on_accelerator).wait()
        if (is_kept := self.inner.is_kept(message.on_accelerator)) is not None:
            message.on_accelerator.mul_(is_kept)
        message.to_host()

    def apply(self, bucket: Bucket) -> None:
        """Update the owned stretches of a bucket."""
        for piece in self._pieces[bucket]:
            group, message = self._group(piece), self._message.of(bucket)
            self.inner.decay(piece.param, group)
            for stretch in self._exchange.stretches[piece]:
                own, update = stretch.runs.view(piece.param), stretch.in_message(message)
                self.inner.add(own, update, group, self.matrices[stretch.matrix].whole_shape)

    def end(self) -> None:
        """End an update: free the message on the accelerator."""
        self._message.free()

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
        return [value for state in self.inner.matrix_states.values() for value in state.values()]

    @property
    def state_bytes(self) -> float:
        """The bytes of the states of all matrices that the ranks along the shard axis share, on one tensor rank."""
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


def _matrices(
    module: nn.Module, flats: Sequence[FlatParameters], params: Mapping[nn.Parameter, int], tensor_size: int
) -> list[Matrix]:
    """Return the matrices of parameters, in the order of the layout; `params` has the number of the group of each."""
    split, packed = split_dims(module), packed_rows(module)
    spans = [item for flat in flats for item in zip(flat.params, flat.layout.spans, strict=True) if item[0] in params]
    return [
        matrix
        for param, span in spans
        for matrix in matrices_of(
            span.name, span.shape, params[param], packed.get(span.name), split.get(span.name), tensor_size
        )
    ]
