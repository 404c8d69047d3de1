"""The pieces of matrices that this rank owns, their names and states: what all updates of matrices have in common."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel.memory_kinds import TensorKind, allocating
from parallel.mesh import Axis
from parallel.tensor.split_parameters import packed_rows, split_dims
from zero.buckets.flat import FlatParameters
from zero.optimizers.matrices import Assignment, Matrix, matrices_of
from zero.optimizers.matrix_method import MatrixMethod
from zero.step.assembled_updates import AssembledUpdates
from zero.step.pieces import OwnedPieces, Piece


class OwnedMatrices(AssembledUpdates):
    """The matrices in some groups of an optimizer, of which there is at least one; a class derived updates them."""

    how: ClassVar[str]
    """How they are updated, for a report."""
    assignment: Assignment
    """The rank that computes each matrix."""

    def __init__(
        self,
        inner: MatrixMethod,
        groups: Set[int],
        module: nn.Module,
        pieces: OwnedPieces,
        tensor: Axis,
        device: torch.device,
    ):
        self.inner, self._groups, self._device, self._tensor_axis = inner, groups, device, tensor
        self.tensor = tensor if inner.defaults.get("joins_parts", True) else tensor.without_peers()
        """The axis along which the parts of matrices are put together."""
        params = {param: number for param, number in pieces.group_of.items() if number in groups}
        owned = pieces.by_bucket.items()
        self.pieces = {bucket: [piece for piece in own if piece.group in groups] for bucket, own in owned}
        self.other_pieces = {bucket: [piece for piece in own if piece.group not in groups] for bucket, own in owned}
        self.buckets = {bucket for bucket in pieces.by_bucket if not params.keys().isdisjoint(bucket.grads.parts)}
        """The buckets in which any rank owns a stretch of a matrix: the same on all ranks."""
        self.layouts = [flat.layout for flat in pieces.flats]
        self._split = split_dims(module)
        self.matrices = _matrices(module, pieces.flats, params, self.tensor.size, inner.param_groups)
        """All matrices, in the order of the layout."""

    @property
    @abstractmethod
    def own(self) -> list[int]:
        """The numbers of the matrices that this rank computes, whose states it has."""

    @abstractmethod
    def sent_numels(self) -> list[int]:
        """Return the number of elements that each data rank sends to other shard ranks in a step."""

    def begin(self) -> None:
        """Begin an update."""
        for number in self._groups:
            self.inner.start_round(self.inner.param_groups[number])

    def states(self) -> dict[str, Tensor]:
        """Return the states of the whole matrices of this rank, by name, for a checkpoint; they are made if need be.

        A matrix that each tensor rank has for itself has one for each of them.
        """
        names = self._names()
        return {
            f"{names[number]}.{kind}": value for number in self.own for kind, value in self.state_of(number).items()
        }

    def present_states(self) -> list[Tensor]:
        """Return the states of whole matrices that have been made."""
        return [value for state in self.inner.matrix_states.values() for value in state.values()]

    @property
    def state_bytes(self) -> float:
        """The bytes of the states of all matrices that the ranks along the shard axis share, on one tensor rank."""
        return sum(self.inner.matrix_state_bytes(matrix.whole_shape) / matrix.num_parts for matrix in self.matrices)

    def state_of(self, number: int) -> dict[str, Tensor]:
        """Return the states of a matrix, which are made if there are none."""
        with allocating(TensorKind.MOMENTS):
            return self.inner.state_of_matrix(number, self.matrices[number].whole_shape, self._device)

    def flops_of(self, matrix: Matrix) -> int:
        """Return a number proportional to the FLOPs of a matrix."""
        return self.inner.flops(matrix.whole_shape, self.inner.param_groups[matrix.group])

    def group_of(self, piece: Piece) -> dict[str, Any]:
        """Return the parameter group of a piece."""
        return self.inner.param_groups[piece.group]

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
