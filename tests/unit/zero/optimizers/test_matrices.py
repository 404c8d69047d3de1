"""Packed matrices and their stretches, and an even division of matrices over ranks."""

import math
from itertools import pairwise

import pytest
import torch

from parallel.validation.errors import ConfigError
from zero.core.partition.layout import Layout
from zero.updates.matrices import Matrix, assign, matrices_of, near_owners, owned_by_all
from zero.updates.muon import Muon

COLUMNS = 5


@pytest.mark.parametrize(("packed", "num_rows"), [(None, 6), ((2, 2, 2), 18), ((3, 1, 1), 10), ((1, 1), 4)])
def test_the_stretches_of_packed_matrices_are_their_rows(packed, num_rows):
    """Row r of the parameter is row r % period of a repetition; any range of elements is divided among the matrices."""
    param = torch.arange(num_rows * COLUMNS).view(num_rows, COLUMNS)
    numbers = packed or (num_rows,)
    expected = [part.flatten(0, 1) for part in param.unflatten(0, (-1, sum(numbers))).split(numbers, dim=1)]
    matrices = matrices_of("w", param.shape, 0, packed)
    assert [matrix.shape for matrix in matrices] == [tuple(whole.shape) for whole in expected]
    for cuts in ((0, num_rows * COLUMNS), (0, 7, 8, 33, 33, num_rows * COLUMNS)):
        found = [torch.full((matrix.numel,), -1) for matrix in matrices]
        for start, stop in pairwise(cuts):
            elements = range(min(start, param.numel()), min(stop, param.numel()))
            for own, matrix in zip(found, matrices, strict=True):
                runs_in = list(matrix.runs_in(elements))
                assert len(runs_in) <= 3
                for runs, first in runs_in:
                    values = runs.view(param.flatten()[elements.start : elements.stop])
                    own[first : first + runs.numel] = values.flatten()
        for own, whole in zip(found, expected, strict=True):
            assert own.equal(whole.flatten())


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ConfigError, match=r"qkv has 8 rows, which are not whole repetitions of packed_rows=\(1, 2\)"):
        matrices_of("qkv", (8, 4), 0, (1, 2))


def test_a_parameter_without_elements_has_no_matrix():
    assert matrices_of("empty", (0, 4), 0) == matrices_of("empty", (4, 0), 0, (1, 1)) == []


def gpt2_xl() -> list[Matrix]:
    """Return the matrices of GPT-2 1.5B."""
    found = []
    for layer in range(48):
        found += matrices_of(f"{layer}.qkv", (4800, 1600), 0, (64, 64, 64))
        found += matrices_of(f"{layer}.projection", (1600, 1600), 0)
        found += matrices_of(f"{layer}.up", (6400, 1600), 0)
        found += matrices_of(f"{layer}.down", (1600, 6400), 0)
    return found


@pytest.mark.parametrize("iterates_on", ["matrix", "gram"])
@pytest.mark.parametrize("num_ranks", [8, 32, 256, 400])
def test_the_work_at_1_5_billion_parameters_is_even(num_ranks, iterates_on):
    matrices = gpt2_xl()
    assert len(matrices) == 48 * 6
    group = Muon.own_defaults | {"iterates_on": iterates_on}
    costs = {matrix: Muon.flops(matrix.whole_shape, group) for matrix in matrices}
    flops, largest = assign(matrices, lambda matrix: costs[matrix], num_ranks).all_flops, max(costs.values())
    assert sum(flops) == sum(costs[matrix] for matrix in matrices)
    assert flops.count(0) == max(0, num_ranks - len(matrices))
    assert max(flops) <= 1.15 * max(sum(flops) / num_ranks, largest)


def test_parts_of_tensor_ranks_are_computed_by_one_of_them():
    """Matrices that are split are divided over all ranks; of the others, each tensor rank computes its own."""
    split = [Matrix(f"{n}", (2, 4), range(2), 2, 0, joined_dim=1, num_parts=2) for n in range(6)]
    whole = [Matrix("replicated", (4, 4), range(4), 4, 0)]
    assert split[0].whole_shape == (2, 8)
    assignment = assign(split + whole, lambda matrix: math.prod(matrix.whole_shape), 3, tensor_size=2)
    assert sorted(assignment.places[:6]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert assignment.places[6] == (0, None)
    assert assignment.flops == [[32, 32], [16, 16], [16, 16]]


@pytest.mark.parametrize(
    ("num_ranks", "bucket_numel", "most_moved"), [(2, 2**25, 0.1), (2, 2**17, 0.1), (4, 2**25, 0.2)]
)
def test_ranks_compute_matrices_that_they_own(num_ranks, bucket_numel, most_moved):
    """Their work stays what `assign` gave them. Of matrices at random places (N-1)/N of all elements would move."""
    matrices, shapes = [], {"embedding": torch.Size((256, 64))}
    for layer in range(8):
        for name, shape in ((f"{layer}.qkv", (192, 64)), (f"{layer}.up", (256, 64)), (f"{layer}.down", (64, 256))):
            shapes[name] = torch.Size(shape)
            matrices += matrices_of(name, shape, 0)
    layout = Layout.of(shapes, num_ranks, bucket_numel)

    def flops_of(matrix: Matrix) -> int:
        return Muon.flops(matrix.whole_shape, Muon.own_defaults)

    even = assign(matrices, flops_of, num_ranks)
    near = near_owners(even, matrices, flops_of, [layout], num_ranks)
    flops = [0] * num_ranks
    for matrix, (rank, _) in zip(matrices, near.places, strict=True):
        flops[rank] += flops_of(matrix)
    assert flops == even.all_flops == near.all_flops
    stretches = list(owned_by_all(matrices, range(len(matrices)), [layout]))
    moved = sum(runs.numel for owner, number, _, runs in stretches if owner != near.places[number][0])
    assert moved <= most_moved * sum(matrix.numel for matrix in matrices)
