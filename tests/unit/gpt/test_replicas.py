"""The comparison of replicas: what is read for it, and its error, which names ranks and parameters."""

import pytest
import torch

from gpt.replicas import _compare, _message
from parallel.mesh import Axis


def test_nothing_is_read_for_an_axis_of_one_rank():
    tensors = iter([("weight", torch.ones(2))])
    _compare("the parameters", Axis.trivial("data"), tensors, torch.device("cpu"))
    assert len(list(tensors)) == 1


@pytest.mark.parametrize(
    ("checksums", "names", "message"),
    [
        ([5, 5, 7], ["a"], "rank 2 differ in a from those of the other 2, to which they should be equal"),
        ([7, 5, 5, 8, 5], ["a", "b", "c"], "ranks 0, 3 differ in a, b, c from those of the other 3, to which"),
        ([7, 5, 5, 7], ["a", "b", "c", "d"], "ranks 0, 1, 2, 3 differ in a, b, c and 1 more, and should be equal; no "),
        ([1, 2, 3, 3, 4], ["a"], "ranks 0, 1, 2, 3, 4 differ in a, and should be equal; no majority shows which is"),
        ([1, 2], [*"abcdef"], "ranks 0, 1 differ in a, b, c and 3 more, and should be equal; no majority"),
    ],
)
def test_a_majority_shows_which_replicas_differ(checksums: list[int], names: list[str], message: str):
    axis = Axis("data", len(checksums), 0, Axis.trivial("data").log)
    found = _message("step 3: the parameters", axis, checksums, names)
    assert found.startswith(f"step 3: the parameters of data {message}")
