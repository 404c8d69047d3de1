"""Dion over ranks: the elements of matrices stay where they are, and rows of their factors of low rank are sent.

prepare    of every bucket with matrices: B of the owned elements, and their part of B Q, of m x r
send       these rows to the owner of each matrix; buckets without matrices are updated while they are on their way
compute    P, which the owner makes of their sum, returns to them; their part of R = B^T P, of n x r, to the owner
returned   R returns, with the inverse lengths of its columns in a row of its own, and gives every rank the next Q
apply      error feedback, weight decay and the update P Q^T of the owned elements

A row that shards cut has several parts, whose products are added as those of tensor ranks are. A matrix is owned by one
of the ranks that have elements of it. Replicas do the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import groupby

from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, allocating
from parallel.validation.errors import ConfigError
from zero.buckets.bucket import Bucket
from zero.memory.placement import Offload, Placement
from zero.optimizers.dion_method import MOMENTUM, RIGHT, DionMethod, column_scales, normalized, orthonormal
from zero.optimizers.exchange import MOST_BATCH_BYTES
from zero.optimizers.factors import Factor, Share, shares_of_all
from zero.optimizers.matrices import Assignment, Matrix
from zero.optimizers.owned_matrices import OwnedMatrices
from zero.partition.layout import cut
from zero.step.assembled_updates import Axes
from zero.step.pieces import OwnedPieces, Piece


class FactorUpdates(OwnedMatrices):
    """The updates of matrices by factors."""

    inner: DionMethod
    how = "by factors"

    def __init__(
        self,
        inner: DionMethod,
        groups: Set[int],
        module: nn.Module,
        pieces: OwnedPieces,
        axes: Axes,
        offload: Offload,
        *,
        one_by_one: bool,
    ):
        """Plan the messages; `axes`: (shard, replica, tensor). Raises ConfigError if it has to be `one_by_one`."""
        if one_by_one:
            raise ConfigError(
                "the bits of Dion depend on the number of ranks, which add their parts of factors: choose another "
                "optimizer than Dion with ZeroConfig.sum_over_ranks=leaves"
            )
        self._shard, _, tensor = axes
        super().__init__(inner, groups, module, pieces, tensor, offload.device)
        own_pieces = {(piece.name, piece.in_param.start): piece for own in self.pieces.values() for piece in own}
        shares = list(shares_of_all(self.matrices, self.layouts, self.tensor))
        parts = [share.left for _, _, share in shares], list(dict.fromkeys(share.right for _, _, share in shares))
        self._shares: defaultdict[Piece, list[Share]] = defaultdict(list)
        for name, start, share in shares:
            if share.left.rank == self._shard.rank:
                self._shares[own_pieces[name, start]].append(share)
        self._own_rights = {part.matrix: part for part in parts[1] if part.rank == self._shard.rank}
        self._holders: defaultdict[int, list[int]] = defaultdict(list)
        for part in parts[1]:
            self._holders[part.matrix].append(part.rank)
        self.assignment = self._assign()
        self._owners = [rank for rank, _ in self.assignment.places]
        kinds = [(matrix.num_parts == 1, matrix.kind) for matrix in self.matrices]
        grouped = groupby(sorted(self.own, key=kinds.__getitem__), kinds.__getitem__)
        batches = [(list(alike), not is_whole) for (is_whole, _), alike in grouped]
        columns = [inner.factor_columns(matrix.whole_shape) for matrix in self.matrices]
        heights = (
            [matrix.whole_shape[0] for matrix in self.matrices],
            [_num_column_parts(matrix) * (matrix.shape[1] + 1) for matrix in self.matrices],
        )
        self._left, self._right = (
            Factor(of_all, self._owners, list(zip(rows, columns, strict=True)), batches, (self._shard, self.tensor))
            for of_all, rows in zip(parts, heights, strict=True)
        )
        self._rights: dict[int, Tensor] = {}  # the rows of Q of each matrix of which this rank has elements
        self._has_rights = False  # the same on all ranks

    @property
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank owns."""
        return [number for number, owner in enumerate(self._owners) if owner == self._shard.rank]

    def begin(self) -> None:
        """Begin an update; in the first one of a run, owners give Q to the other ranks."""
        super().begin()
        with allocating(TensorKind.BUFFERS):
            if not self._has_rights:
                self._right.begin(self.inner.factor_dtype, self._device)
                self._share_rights()
            self._left.begin(self.inner.factor_dtype, self._device)
            self._right.begin(self.inner.factor_dtype, self._device)  # again: of zeros

    def prepare(self, bucket: Bucket, grad: Tensor) -> None:
        """Add a bucket's flat gradient to the momentum of owned elements, and multiply these by Q."""
        for piece in self.pieces[bucket]:
            with allocating(TensorKind.MOMENTS, on_host=bucket.optimizer_placement is Placement.HOST):
                self.inner.prepare(piece.param)
            self.inner.accumulate(piece.param, cut(grad, piece.elements), self.group_of(piece))
            for share in self._shares[piece]:
                right = self._rights[share.left.matrix]
                self._left.held(share.left).copy_(share.rows_of(self._momentum(piece), right) @ right)

    def send(self) -> None:
        """Launch the message with the products."""
        self._left.send()

    def compute(self) -> None:
        """Compute P of own matrices, and R of all of them."""
        left, right = self._left, self._right
        with allocating(TensorKind.BUFFERS):
            wholes = left.add_up()
            for _, factors in left.batches(wholes):
                for some in factors.split(max(1, MOST_BATCH_BYTES // factors[0].nbytes)):
                    some.copy_(orthonormal(some))
            left.send_back(wholes)
            left.wait()
            for piece, shares in self._shares.items():
                for share in shares:
                    own_left = left.held(share.left)
                    rows = share.rows_of(self._momentum(piece), own_left)
                    right.held(share.right)[:-1].addmm_(rows.T, own_left)
            right.send()
            wholes = right.add_up()
            for numbers, factors in right.batches(wholes):
                self._normalize(numbers, self._by_parts(numbers[0], factors))
            right.send_back(wholes)

    def returned(self) -> Iterator[bool]:
        """Wait for R, of which the next Q follows."""
        self._right.wait()
        for number, before in self._rights.items():
            if self._owners[number] != self._shard.rank:
                right = self._right.held(self._own_rights[number])
                before.copy_(normalized(right[:-1], right[-1], before))
        yield True

    def apply(self, bucket: Bucket) -> None:
        """Update the owned elements of a bucket, and their momentum."""
        for piece in self.pieces[bucket]:
            group, momentum = self.group_of(piece), self._momentum(piece)
            for share in self._shares[piece]:
                left = self._left.held(share.left)
                right = self._right.held(share.right)
                for runs, product in share.elements(left @ right[:-1].T):
                    self.inner.feed_back(runs.view(momentum), product.to(momentum), group)
                for runs, update in share.elements(left @ (right[:-1] * right[-1]).T):
                    shape = self.matrices[share.left.matrix].whole_shape
                    self.inner.add(runs.view(piece.param), update.to(piece.param), group, shape)

    def end(self) -> None:
        """End an update: free the messages."""
        self._left.end()
        self._right.end()
        self.inner.end_round()

    def take_loaded(self) -> None:
        """Let the other ranks get what owners have loaded, in the next update."""
        self._has_rights = False

    def present_states(self) -> list[Tensor]:
        """Return the right factors of own matrices, and copies of those of others."""
        others = [value for number, value in self._rights.items() if self._owners[number] != self._shard.rank]
        return super().present_states() + others

    @property
    def state_bytes(self) -> float:
        """The bytes of the right factors that the ranks along the shard axis have, on one tensor rank."""
        itemsize, found = self.inner.factor_dtype.itemsize, 0
        for number, matrix in enumerate(self.matrices):
            num_copied = matrix.shape[1] * (len(self._holders[number]) - 1)
            found += (matrix.whole_shape[1] + num_copied) * self.inner.factor_columns(matrix.whole_shape) * itemsize
        return found

    def sent_numels(self) -> list[int]:
        """Return the number of elements of factors that each data rank sends to other shard ranks in a step."""
        return [left + right for left, right in zip(self._left.sent_numels, self._right.sent_numels, strict=True)]

    def _assign(self) -> Assignment:
        """Return the owner of each matrix, the largest first: of its holders, the one that has least work so far."""
        costs = [self.flops_of(matrix) for matrix in self.matrices]
        flops, owners = [0] * self._shard.size, dict.fromkeys(range(len(costs)), 0)
        for number in sorted(owners, key=lambda number: -costs[number]):
            owner = owners[number] = min(self._holders[number], key=lambda rank: (flops[rank], rank))
            flops[owner] += costs[number]
        return Assignment([(owner, None) for owner in owners.values()], [[one] * self.tensor.size for one in flops])

    def _normalize(self, numbers: Sequence[int], by_parts: Tensor) -> None:
        """Write the inverse lengths of columns below sums of R, (number, parts, rows, columns), and take the next Q."""
        products = by_parts[:, :, :-1].flatten(1, 2)
        scales = column_scales(products, self.inner.if_kept(1.0, products.dtype))
        by_parts[:, :, :-1].mul_((scales != 0)[:, None, None])
        by_parts[:, :, -1] = scales[:, None]
        for number, parts in zip(numbers, by_parts, strict=True):
            right = self._by_column_parts(number)
            right.copy_(normalized(parts[:, :-1], parts[0, -1], right))

    def _share_rights(self) -> None:
        """Send the present Q of own matrices to the ranks that have elements of them."""
        wholes = self._right.new_wholes()
        for numbers, factors in self._right.batches(wholes):
            for number, by_parts in zip(numbers, self._by_parts(numbers[0], factors), strict=True):
                by_parts[:, :-1] = self._by_column_parts(number)
        self._right.send_back(wholes)
        self._right.wait()
        for number, part in self._own_rights.items():
            if self._owners[number] == self._shard.rank:
                of_tensor = self.tensor.rank if self.matrices[number].joined_dim == 1 else 0
                self._rights[number] = self._by_column_parts(number)[of_tensor]
            else:
                with allocating(TensorKind.MOMENTS):
                    self._rights[number] = self._right.held(part)[:-1].clone()
        self._has_rights = True

    def _by_parts(self, number: int, factors: Tensor) -> Tensor:
        """Return right factors with the rows of inverse lengths, (number, parts of tensor ranks, rows, columns)."""
        return factors.unflatten(1, (_num_column_parts(self.matrices[number]), -1))

    def _by_column_parts(self, number: int) -> Tensor:
        """Return a view of the Q of an own matrix, (parts of tensor ranks, rows, columns)."""
        return self.state_of(number)[RIGHT].unflatten(0, (_num_column_parts(self.matrices[number]), -1))

    def _momentum(self, piece: Piece) -> Tensor:
        return self.inner.state[piece.param][MOMENTUM]


def _num_column_parts(matrix: Matrix) -> int:
    """Return the number of tensor ranks that have different columns of a matrix."""
    return matrix.num_parts if matrix.joined_dim == 1 else 1


class Dion(DionMethod):
    """Dion for groups of matrices, and AdamW for groups with update="adamw"."""

    updates_class = FactorUpdates
