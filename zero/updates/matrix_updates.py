"""The update of matrices whose elements many ranks own, bucket by bucket, around messages there and back.

prepare    of every bucket with matrices: momentum of the owned stretches, whose directions are written to a message
send       launch the messages; buckets without matrices are updated while they are on their way
compute    whole matrices, each on one rank, and equal ones in one batch; their updates return in the same messages
returned   of every bucket with matrices: `apply` weight decay and update of the owned stretches

What is element-wise stays with the owners of stretches, and only directions and updates are sent: to gather the momenta
everywhere would send N/2 times as much, and every rank would compute every matrix.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, allocating
from parallel.tensor.split_parameters import packed_rows, split_dims
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.layout import cut
from zero.core.protocols.home import Homes
from zero.core.step.assembled_updates import AssembledUpdates, Axes
from zero.core.step.pieces import OwnedPieces
from zero.updates.exchange import MatrixExchange, join, take_apart
from zero.updates.matrices import Matrix, assign, matrices_of, near_owners
from zero.updates.matrix_method import MatrixMethod
from zero.updates.rounds import Round, rounds_of


class MatrixUpdates(AssembledUpdates):
    """The updates of the matrices in some groups of an optimizer, of which there is at least one."""

    def __init__(
        self,
        inner: MatrixMethod,
        groups: Set[int],
        module: nn.Module,
        pieces: OwnedPieces,
        axes: Axes,
        homes: Homes,
        *,
        one_by_one: bool,
    ):
        """Plan the messages; `axes`: (shard, replica, tensor), over all of which matrices are divided."""
        shard, replica, tensor = axes
        self._inner, self._groups, self._device, self._tensor_axis = inner, groups, homes.device, tensor
        joined = tensor if inner.defaults.get("joins_parts", True) else tensor.without_peers()
        params = {param: number for param, number in pieces.group_of.items() if number in groups}
        owned = pieces.by_bucket.items()
        self._pieces = {bucket: [piece for piece in own if piece.group in groups] for bucket, own in owned}
        self.other_pieces = {bucket: [piece for piece in own if piece.group not in groups] for bucket, own in owned}
        self.buckets = {bucket for bucket in pieces.by_bucket if not params.keys().isdisjoint(bucket.grads.parts)}
        """The buckets in which any rank owns a stretch of a matrix: the same on all ranks."""
        self._split = split_dims(module)
        self.matrices = _matrices(module, pieces.flats, params, joined.size, inner.param_groups)
        """All matrices, in the order of the layout."""
        self._max_batch = 1 if one_by_one else None  # matrices that are computed as one batch
        # States of whole matrices are saved by one of the replicas, which then has to have all of them. The parts of
        # replicas are as long as the longest one: with fewer matrices than ranks they would be mostly padding.
        is_divided = not inner.matrix_state_bytes((1, 1)) and len(self.matrices) >= shard.size * replica.size
        divided = replica if is_divided else replica.without_peers()
        even = assign(self.matrices, self._flops_of, shard.size * divided.size, joined.size)
        layouts = [flat.layout for flat in pieces.flats]
        self.assignment = near_owners(even, self.matrices, self._flops_of, layouts, shard.size)
        """The rank that computes each matrix."""
        own = [piece for of_bucket in self._pieces.values() for piece in of_bucket]
        divided_axes = shard, divided, joined
        self._rounds = [
            Round(
                MatrixExchange(self.matrices, chosen, self.assignment, layouts, own, divided_axes),
                inner.message_dtype,
                homes,
            )
            for chosen in rounds_of(self.matrices, self.assignment)
        ]

    def begin(self) -> None:
        """Begin an update: allocate the messages."""
        for number in self._groups:
            self._inner.start_round(self._inner.param_groups[number])
        apart = [bucket for bucket in self.buckets if bucket.home.is_apart]
        pieces = [piece for bucket in apart for piece in self._pieces[bucket]]
        for one in self._rounds:
            places = [stretch.place for piece in pieces for stretch in one.exchange.stretches[piece]]
            one.allocate(places if len(apart) < len(self.buckets) else [one.elements])

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Update the states of a bucket's owned stretches, and write their directions; `grad` is its flat gradient."""
        for piece in self._pieces[bucket]:
            with bucket.home.allocating(TensorKind.MOMENTS):
                self._inner.prepare(piece.param)
            own, group = cut(grad, piece.elements), self._inner.param_groups[piece.group]
            for one in self._rounds:
                for stretch in one.exchange.stretches[piece]:
                    # Also if another replica computes the matrix: it overwrites these elements by its update.
                    out = stretch.in_message(one.of(bucket))
                    self._inner.direction(piece.param, own, group, stretch.runs.view, out)

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
        for piece in self._pieces[bucket]:
            group = self._inner.param_groups[piece.group]
            for stretch in self._present.exchange.stretches[piece]:
                own, update = stretch.runs.view(piece.param), stretch.in_message(self._present.of(bucket))
                self._inner.add(own, update, group, self.matrices[stretch.matrix].whole_shape)

    def end(self) -> None:
        """End an update: free the messages on the accelerator."""
        for one in self._rounds:
            one.free()
        self._inner.end_round()

    def states(self) -> dict[str, Tensor]:
        """Return the states of the whole matrices of this rank, by name, for a checkpoint; they are made if need be.

        A matrix that each tensor rank has for itself has one for each of them.
        """
        names, own = self._names(), (number for one in self._rounds for number in one.exchange.own)
        return {f"{names[number]}.{kind}": value for number in own for kind, value in self._state_of(number).items()}

    def present_states(self) -> list[Tensor]:
        """Return the states of whole matrices that have been made."""
        return [value for state in self._inner.matrix_states.values() for value in state.values()]

    @property
    def state_bytes(self) -> float:
        """The bytes of the states of all matrices that the ranks along the shard axis share, on one tensor rank."""
        return sum(self._inner.matrix_state_bytes(matrix.whole_shape) / matrix.num_parts for matrix in self.matrices)

    def sent_numels(self) -> list[int]:
        """Return the number of elements of matrices that each data rank sends to other shard ranks in a step."""
        return [sum(numels) for numels in zip(*(one.exchange.sent_numels() for one in self._rounds), strict=True)]

    def _flops_of(self, matrix: Matrix) -> int:
        return self._inner.flops(matrix.whole_shape, self._inner.param_groups[matrix.group])

    def _state_of(self, number: int) -> dict[str, Tensor]:
        """Return the states of a matrix, which are made if there are none."""
        with allocating(TensorKind.MOMENTS):
            return self._inner.state_of_matrix(number, self.matrices[number].whole_shape, self._device)

    def _transform(self, numbers: list[int], parts: list[Tensor]) -> None:
        matrix = self.matrices[numbers[0]]
        wholes = join(parts, matrix.joined_dim)
        states = [self._state_of(number) for number in numbers]
        self._inner.transform(wholes, self._inner.param_groups[matrix.group], states)
        take_apart(wholes, parts, matrix.joined_dim)

    def _names(self) -> list[str]:
        """Return the names of all matrices in a checkpoint: each has a number among those of its parameter."""
        names, tensor = [], self._tensor_axis
        num_of_param, num_named = Counter(matrix.param for matrix in self.matrices), Counter[str]()
        for matrix in self.matrices:
            number, suffix = num_named[matrix.param], ""
            if matrix.is_repetition and matrix.param in self._split:  # tensor ranks have one after the other
                number += tensor.rank * num_of_param[matrix.param]
            elif matrix.num_parts < tensor.size:
                suffix = f".{tensor.rank}"
            names.append(f"matrix.{matrix.param}.{number}{suffix}")
            num_named[matrix.param] += 1
        return names


def _matrices(
    module: nn.Module,
    flats: Sequence[FlatParameters],
    params: Mapping[nn.Parameter, int],
    tensor_size: int,
    groups: Sequence[Mapping[str, Any]],
) -> list[Matrix]:
    """Return the matrices of parameters, in the order of the layout; `params` has the number of the group of each."""
    split, packed = split_dims(module), packed_rows(module)
    spans = [item for flat in flats for item in zip(flat.params, flat.layout.spans, strict=True) if item[0] in params]
    return [
        matrix
        for param, span in spans
        for matrix in matrices_of(
            span.name,
            span.shape,
            params[param],
            packed.get(span.name),
            split.get(span.name),
            tensor_size,
            per_repetition=groups[params[param]].get("per_repetition", False),
        )
    ]
