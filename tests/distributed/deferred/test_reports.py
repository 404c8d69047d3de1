"""The reports of deferred execution: a wait that is missing shows as poison or as an error."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel.mesh import Mesh
from tests.deferred import deferred
from tests.ranks import run_ranks
from tests.simulated_streams import Race
from zero.memory.placement import Offload
from zero.memory.staging import free_storage
from zero.memory.streams import SideStream

CPU = torch.device("cpu")


def test_a_copy_runs_when_it_is_waited_for_and_not_before():
    with deferred():
        offload, source, out = Offload(CPU), torch.ones(4), torch.zeros(4)
        work = offload.to_host(source, out)
        assert out.isnan().all()
        source.fill_(2)  # a mistake: the copy reads it late
        work.wait()
        assert out.tolist() == [2] * 4


def test_work_of_a_stream_runs_in_order_and_only_what_is_waited_for():
    with deferred() as streams:
        offload, outs = Offload(CPU), [torch.zeros(2) for _ in range(3)]
        sources = [torch.full((2,), float(n)) for n in range(3)]
        works = [offload.to_host(source, out) for source, out in zip(sources, outs, strict=True)]
        works[1].wait()
        assert [out.isnan().any().item() for out in outs] == [False, False, True]
        assert len(streams.pending) == 1
        offload.synchronize()
        assert outs[2].tolist() == [2, 2]


def test_operations_of_a_side_stream_run_late():
    with deferred():
        side, a = SideStream(CPU), torch.arange(4.0)
        with side.context():
            doubled = a * 2
            a.add_(1)
            total = torch.empty(())
            torch.sum(doubled, 0, out=total)
        assert doubled.isnan().all()
        assert a.isnan().all()
        side.device_work().wait()
        assert (doubled.tolist(), a.tolist(), total.item()) == ([0, 2, 4, 6], [1, 2, 3, 4], 12)


def free_too_soon(offload: Offload) -> None:
    source = torch.ones(4)
    offload.to_host(source, torch.empty(4))
    free_storage(source)


def drop_too_soon(offload: Offload) -> None:
    out = torch.empty(4)
    copied = offload.to_accelerator(torch.ones(4), out)  # nothing else holds the source
    copied.wait()


def write_too_soon(offload: Offload) -> None:
    out = torch.empty(4)
    copied = offload.to_host(source := torch.ones(4), out)
    out.zero_()
    copied.wait()
    del source


def forget_a_stream(offload: Offload) -> None:
    source, out, side = torch.ones(4), torch.empty(4), SideStream(CPU)
    offload.to_host(source, out)
    with side.context():
        torch.empty(4).copy_(out)


def forget_to_wait(offload: Offload) -> None:
    offload.to_host(torch.ones(4), torch.empty(4))


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        (free_too_soon, "memory is freed before aten.copy_.default has run"),
        (drop_too_soon, "memory was freed before the work that uses it has run"),
        (write_too_soon, "an output was written before"),
        (forget_a_stream, "aten.copy_.default does not wait for aten.copy_.default, which uses the same memory"),
        (forget_to_wait, "never waited for: aten.copy_.default"),
    ],
)
def test_a_mistake_is_reported(mistake: Callable[[Offload], None], report: str):
    with pytest.raises(Race, match=report), deferred():
        mistake(Offload(CPU))


def test_two_copies_through_one_cast_buffer_are_both_right():
    """The third cast waits for the first one's copy, and not for the second one's."""
    with deferred() as streams:
        offload = Offload(CPU)
        outs = [torch.empty(4, dtype=torch.float32) for _ in range(3)]
        works = [
            offload.to_accelerator(torch.full((4,), float(n), dtype=torch.float64), out) for n, out in enumerate(outs)
        ]
        assert len(streams.pending) == 2
        for work in works:
            work.wait()
        assert [out[0].item() for out in outs] == [0, 1, 2]


def check_collectives_run_late() -> None:
    data = Mesh.create(tensor_size=1).data
    with deferred() as streams:
        out, own = torch.zeros(4), torch.full((2,), float(data.rank))
        gathered = data.all_gather(own, out=out)
        assert out.isnan().all()
        own += 10  # read late
        full = torch.arange(4.0)
        part = full[2 * data.rank : 2 * data.rank + 2]
        scattered = data.reduce_scatter(full, out=part)
        assert [full.isnan()[n].item() for n in (0, 2)] == [data.rank == 0, data.rank == 1], "only its part"
        total = torch.tensor([data.rank + 1])
        reduced = data.all_reduce(total, out=total)
        assert total == torch.iinfo(torch.int64).max
        scattered.wait()  # the gather runs first
        assert out.tolist() == [10, 10, 11, 11]
        assert part.tolist() == ([0, 2] if data.rank == 0 else [4, 6])
        assert len(streams.pending) == 1
        reduced.wait()
        assert total == 3
        gathered.wait()
        shards = out.chunk(2)
        in_place = data.all_gather(shards[data.rank].fill_(5 + data.rank), out=out)
        assert [shard.isnan().any().item() for shard in shards] == [data.rank == 1, data.rank == 0], "all but its own"
        in_place.wait()
        assert out.tolist() == [5, 5, 6, 6]


def test_collectives_run_when_they_are_waited_for():
    run_ranks(2, check_collectives_run_late)


def ordered_behind_another(waits: bool) -> list[float]:
    """Reduce between two groups of ranks what a scatter leaves, on a side stream that waits for it, or does not."""
    mesh = Mesh.create(tensor_size=1, shard_size=2)
    shard, replica = mesh.data.parts
    full = torch.arange(4.0) + mesh.data.rank
    part: Tensor = full.chunk(2)[shard.rank]
    with deferred():
        side = SideStream(CPU)
        scattered = shard.reduce_scatter(full, out=part)
        with side.context():
            if waits:
                scattered.wait()
            reduced = replica.all_reduce(part, out=part)
        reduced.wait()
        scattered.wait()
    return part.tolist()


def test_a_collective_behind_another_one_needs_a_wait():
    # 4 ranks hold n + rank: the sums are 4 n + 6.
    assert run_ranks(4, ordered_behind_another, True) == [[6, 10], [14, 18]] * 2
    with pytest.raises(Exception, match="all_reduce does not wait for reduce_scatter, which uses the same memory"):
        run_ranks(4, ordered_behind_another, False)
