"""The update of matrices whose elements many ranks own, bucket by bucket, around messages there and back.

update     of every bucket with matrices: momentum of the owned stretches, whose directions are written to a message
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
from torch.optim import Optimizer

from parallel.memory_kinds import TensorKind, allocating
from parallel.tensor.split_parameters import packed_rows, split_dims
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.layout import cut
from zero.core.step.pieces import Piece
from zero.core.step.update import Shards, Update, UpdateContext
from zero.updates.exchange import MatrixExchange, join, take_apart
from zero.updates.matrices import Matrix, assign, matrices_of, near_owners
from zero.updates.matrix_method import MatrixMethod
from zero.updates.rounds import Round, rounds_of


class MatrixUpdate(Update):
    """The update of the matrices in the groups of an optimizer."""

    optimizer: MatrixMethod

    def __init__(self, optimizer: MatrixMethod, numbers: Sequence[int], context: UpdateContext | None = None):
        """Plan the messages, along all axes of the context: matrices are divided over all of its ranks."""
        super().__init__(optimizer, numbers, context)
        if context is None:
            return
        (shard, replica, tensor), module, pieces = context.find_axes(), context.module, context.pieces
        self._device, self._tensor_axis = context.homes.device, tensor
        joined = tensor if optimizer.defaults.get("joins_parts", True) else tensor.without_peers()
        params = {param: number for param, number in pieces.group_of.items() if number in self.groups}
        self.assembled = {bucket for bucket in pieces.by_bucket if not params.keys().isdisjoint(bucket.grads.parts)}
        self._split = split_dims(module)
        self.matrices = _matrices(module, pieces.flats, params, joined.size, self.groups)
        """All matrices, in the order of the layout."""
        # Matrices that are computed as one batch: the bits of a batched product may depend on its size.
        self._max_batch = 1 if context.is_rank_invariant else None
        # States of whole matrices are saved by one of the replicas, which then has to have all of them. The parts of
        # replicas are as long as the longest one: with fewer matrices than ranks they would be mostly padding.
        is_divided = not optimizer.matrix_state_bytes((1, 1)) and len(self.matrices) >= shard.size * replica.size
        divided = replica if is_divided else replica.without_peers()
        even = assign(self.matrices, self._flops_of, shard.size * divided.size, joined.size)
        layouts = [flat.layout for flat in pieces.flats]
        self.assignment = near_owners(even, self.matrices, self._flops_of, layouts, shard.size)
        """The rank that computes each matrix."""
        own = [piece for of_bucket in self._by_bucket.values() for piece in of_bucket]
        divided_axes = shard, divided, joined
        self._rounds = [
            Round(
                MatrixExchange(self.matrices, chosen, self.assignment, layouts, own, divided_axes),
                optimizer.message_dtype,
                context.homes,
            )
            for chosen in rounds_of(self.matrices, self.assignment)
        ]

    @classmethod
    def check_states(cls, optimizer: Optimizer) -> None:
        """Raise ConfigError if there are states of whole matrices, or others that cannot be cut."""
        super().check_states(optimizer)
        if optimizer.matrix_states:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{type(optimizer).__name__} has states of whole matrices; give it to ZeroOptimizer before its first "
                "step"
            )

    def begin(self) -> None:
        """Begin an update: allocate the messages."""
        for group in self.groups.values():
            self.optimizer.begin_step(group)
        apart = [bucket for bucket in self.assembled if bucket.home.is_apart]
        pieces = [piece for bucket in apart for piece in self._by_bucket.get(bucket, ())]
        for one in self._rounds:
            places = [stretch.place for piece in pieces for stretch in one.exchange.stretches[piece]]
            one.allocate(places if len(apart) < len(self.assembled) else [one.elements])

    def update(self, shards: Shards, unused: Set[Piece]) -> None:
        """Update the states of the owned stretches of buckets, and write their directions."""
        for bucket, grad in shards:
            for piece in self._by_bucket.get(bucket, ()):
                with bucket.home.allocating(TensorKind.MOMENTS):
                    self.optimizer.prepare(piece.param)
                own, group = cut(grad, piece.elements), self.groups[piece.group]
                for one in self._rounds:
                    for stretch in one.exchange.stretches[piece]:
                        # Also if another replica computes the matrix: it overwrites these elements by its update.
                        out = stretch.in_message(one.of(bucket))
                        self.optimizer.direction(piece.param, own, group, stretch.runs.view, out)

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
        for piece in self._by_bucket.get(bucket, ()):
            group = self.groups[piece.group]
            for stretch in self._present.exchange.stretches[piece]:
                own, update = stretch.runs.view(piece.param), stretch.in_message(self._present.of(bucket))
                self.optimizer.add(own, update, group, self.matrices[stretch.matrix].whole_shape)

    def end(self) -> None:
        """End an update: free the messages on the accelerator."""
        for one in self._rounds:
            one.free()
        self.optimizer.end_step()

    def states(self) -> dict[str, Tensor]:
        """Return the states of the whole matrices of this rank, by name, for a checkpoint; they are made if need be.

        A matrix that each tensor rank has for itself has one for each of them.
        """
        names, own = self._names(), (number for one in self._rounds for number in one.exchange.own)
        return {f"{names[number]}.{kind}": value for number in own for kind, value in self._state_of(number).items()}

    def present_states(self) -> list[Tensor]:
        """Return the states of whole matrices that have been made."""
        return [value for state in self.optimizer.matrix_states.values() for value in state.values()]

    @property
    def assembled_state_bytes(self) -> float:
        """The bytes of the states of all matrices that the ranks along the shard axis share, on one tensor rank."""
        return sum(self.optimizer.matrix_state_bytes(matrix.whole_shape) / matrix.num_parts for matrix in self.matrices)

    def sent_numels(self) -> list[int]:
        """Return the number of elements of matrices that each data rank sends to other shard ranks in a step."""
        return [sum(numels) for numels in zip(*(one.exchange.sent_numels() for one in self._rounds), strict=True)]

    def step_alone(self, pieces: Sequence[Piece], grad: Tensor) -> None:
        """Step a whole matrix, given all of its pieces."""
        group = self.groups[0]
        self.optimizer.begin_step(group)
        grads = [cut(grad.flatten(), piece.in_param).clone() for piece in pieces]
        shape = grad.shape[0], grad.shape[1]
        self.optimizer.update_matrix([piece.param for piece in pieces], grads, group, shape)

    def _flops_of(self, matrix: Matrix) -> int:
        return self.optimizer.flops(matrix.whole_shape, self.groups[matrix.group])

    def _state_of(self, number: int) -> dict[str, Tensor]:
        """Return the states of a matrix, which are made if there are none."""
        with allocating(TensorKind.MOMENTS):
            return self.optimizer.state_of_matrix(number, self.matrices[number].whole_shape, self._device)

    def _transform(self, numbers: list[int], parts: list[Tensor]) -> None:
        matrix = self.matrices[numbers[0]]
        wholes = join(parts, matrix.joined_dim)
        states = [self._state_of(number) for number in numbers]
        self.optimizer.transform(wholes, self.groups[matrix.group], states)
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
    groups: Mapping[int, Mapping[str, Any]],
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
