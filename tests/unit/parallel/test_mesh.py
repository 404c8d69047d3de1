"""A mesh of one rank, meshes that are refused, and `Work`: what can be tested without a second rank."""

import pytest

from parallel.mesh import Mesh, Work
from parallel.validation.errors import ConfigError
from parallel.world import imitated_world


def test_a_process_alone_has_trivial_axes_with_one_log():
    mesh = Mesh.create(tensor_size=1)
    assert (mesh.data.size, mesh.data.rank, mesh.tensor.size, mesh.tensor.rank) == (1, 0, 1, 0)
    assert mesh.data.log is mesh.tensor.log is mesh.log
    mesh.barrier()


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((2, None, 1), None),
        ((-1, None, 1), "tensor_size=-1 does not divide the 8 ranks; choose 1, 2, 4, 8, or start another number"),
        ((2, 8, 1), "shard_size=8 does not divide the 4 data-parallel ranks; choose a divisor, or null to shard"),
        ((2, None, 8), "context_size=8 does not divide the 4 data-parallel ranks; choose a divisor"),
        ((1, None, 0), "context_size=0 does not divide the 8 data-parallel ranks; choose a divisor"),
        ((1, 2, 4), "context_size=4 does not divide the 2 ranks of a shard group; choose a divisor"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_named(sizes: tuple[int, int | None, int], problem: str | None):
    tensor_size, shard_size, context_size = sizes
    with imitated_world(0, 8, 8, "nccl"):
        if problem is None:
            assert Mesh.create(tensor_size, shard_size=shard_size, context_size=context_size).size == 8
            return
        with pytest.raises(ConfigError, match=f"^{problem}"):
            Mesh.create(tensor_size, shard_size=shard_size, context_size=context_size)


def test_what_follows_is_launched_now_if_nothing_is_awaited_and_else_when_waited_for():
    taken = []

    def launch() -> Work:
        taken.append("launched")
        return Work(lambda: taken.append("done"))

    chained = Work().then(launch)
    assert taken == ["launched"]
    chained.wait()
    assert taken == ["launched", "done"]

    taken.clear()
    chained = Work(lambda: taken.append("first")).then(launch)
    assert taken == []
    chained.wait()
    assert taken == ["first", "launched", "done"]


def test_what_follows_beside_is_launched_at_once_and_reported_when_it_is_waited_for():
    taken = []
    notes = (lambda: taken.append("wait"), lambda: taken.append("waited"))
    first = Work(lambda: taken.append("first"), on_wait=notes)
    both = first.then_beside(lambda: Work(lambda: taken.append("second")))
    assert taken == ["first"]
    both.wait()
    both.wait()
    assert taken == ["first", "wait", "second", "waited"]
