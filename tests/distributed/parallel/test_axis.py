"""The collectives of an axis against the obvious local computation, and the log of what they sent."""

import itertools
import math
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm_log import CommEvent
from parallel.mesh import Axis, Mesh
from parallel.store import shared_store
from parallel.torch_ranks import as_axis
from tests.ranks import run_ranks
from zero.extensions.host_barrier import HostBarrier

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NUMEL = 12  # of a shard
LIMIT_SECONDS = 120  # after which a hang ends


def message(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return small integers that differ between ranks: sums over eight ranks are exact in every dtype."""
    return ((torch.arange(numel) * 7 + rank * 3) % 16).to(dtype)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_all_gather(axis: Axis, dtype: torch.dtype) -> None:
    shards = [message(rank, NUMEL, dtype) for rank in range(axis.size)]
    out = torch.full((axis.size * NUMEL,), 99, dtype=dtype)
    axis.all_gather(shards[axis.rank], out=out).wait()
    assert_equal(out, torch.cat(shards))

    own = out.fill_(99)[axis.rank * NUMEL : (axis.rank + 1) * NUMEL].copy_(shards[axis.rank])
    axis.all_gather(own, out=out).wait()  # in place
    assert_equal(out, torch.cat(shards))


def check_reduce_scatter(axis: Axis, dtype: torch.dtype) -> None:
    full = message(axis.rank, axis.size * NUMEL, dtype)
    total = sum(message(rank, axis.size * NUMEL, dtype) for rank in range(axis.size))
    own = slice(axis.rank * NUMEL, (axis.rank + 1) * NUMEL)
    out = torch.full((NUMEL,), 99, dtype=dtype)
    axis.reduce_scatter(full, out=out).wait()
    assert_equal(out, total[own])
    assert_equal(full, message(axis.rank, axis.size * NUMEL, dtype))

    axis.reduce_scatter(full, out=full[own]).wait()  # in place
    assert_equal(full[own], total[own])


def check_reduce_scatter_in_fp32(axis: Axis, dtype: torch.dtype) -> None:
    """Check a sum whose small terms are lost one by one in half precision; two are in flight, and one is in place."""
    terms = [1 + message(rank, axis.size * NUMEL, dtype) / 8 + 2048 * (rank == 0) for rank in range(axis.size)]
    own, full = slice(axis.rank * NUMEL, (axis.rank + 1) * NUMEL), terms[axis.rank].clone()
    total = sum(term.double() for term in terms)[own].to(dtype)
    outs = [torch.full((NUMEL,), 99, dtype=dtype) for _ in range(2)]
    works = [axis.reduce_scatter(full, out=out, in_fp32=True) for out in outs]
    for work in reversed(works):
        work.wait()
    axis.reduce_scatter(full, out=full[own], in_fp32=True).wait()
    for out in (*outs, full[own]):
        assert_equal(out, total)


def check_all_reduce(axis: Axis, dtype: torch.dtype) -> None:
    tensor = message(axis.rank, NUMEL, dtype)
    total = sum(message(rank, NUMEL, dtype) for rank in range(axis.size))
    out = torch.full_like(tensor, 99)
    axis.all_reduce(tensor, out=out).wait()
    assert_equal(out, total)
    assert_equal(tensor, message(axis.rank, NUMEL, dtype))

    axis.all_reduce(tensor, out=tensor).wait()  # in place
    assert_equal(tensor, total)


def check_broadcast(axis: Axis, dtype: torch.dtype) -> None:
    for kind in (dtype, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64):
        for shape in ((), (1,), (5,), (3, 4)):
            tensor = message(axis.rank, math.prod(shape), kind).view(shape)
            axis.broadcast(tensor).wait()
            assert_equal(tensor, message(0, math.prod(shape), kind).view(shape))


def check_all_to_all(axis: Axis, dtype: torch.dtype) -> None:
    """Send r * c + 1 elements from rank r to rank c, and nothing to rank 1 from rank 0."""
    numels = [[0 if (r, c) == (0, 1) else r * c + 1 for c in range(axis.size)] for r in range(axis.size)]
    values = [message(rank, sum(numels[rank]), dtype) for rank in range(axis.size)]
    sent, received = numels[axis.rank], [row[axis.rank] for row in numels]
    out, total = torch.full((sum(received),), 99, dtype=dtype), sum(map(sum, numels))
    axis.all_to_all(values[axis.rank], sent, out=out, out_numels=received, total_numel=total).wait()
    parts = [own.split(row)[axis.rank] for own, row in zip(values, numels, strict=True)]
    assert_equal(out, torch.cat(parts))
    axis.all_to_all(out, received, out=values[axis.rank].fill_(99), out_numels=sent, total_numel=total).wait()
    assert_equal(values[axis.rank], message(axis.rank, sum(sent), dtype))  # and back


COLLECTIVES = [
    check_all_gather,
    check_reduce_scatter,
    check_reduce_scatter_in_fp32,
    check_all_reduce,
    check_broadcast,
    check_all_to_all,
]


def check_collectives(checks: list[Callable[[Axis, torch.dtype], None]], device_type: str = "cpu") -> None:
    data = Mesh.create(tensor_size=1, device_type=device_type).data
    assert (data.rank, data.size) == (dist.get_rank(), dist.get_world_size())
    for check, dtype in itertools.product(checks, DTYPES):
        check(data, dtype)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_equal_the_local_computation(num_ranks):
    run_ranks(num_ranks, check_collectives, COLLECTIVES)


@pytest.mark.parametrize("check", COLLECTIVES, ids=lambda check: check.__name__)
def test_an_axis_of_one_rank_writes_out_and_sends_nothing(check):
    axis = Axis.trivial("data")
    axis.log.keeps_events = True
    for dtype in DTYPES:
        check(axis, dtype)
    assert axis.log.events == []
    assert axis.pairwise.received.num_bytes == 0


def collectives_without_a_peer(seconds: int) -> list[str]:
    """Return the errors of two collectives along each axis at once, which only the second rank of an axis launches.

    The axes are the parts of the data axis, and one of a group that a user has made, with a second more. Each of the
    collectives has groups of its own.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    calls = []
    for launch in (gather_ones, sum_ones):
        mesh = Mesh.create(tensor_size=1, shard_size=2)
        group, _ = dist.new_subgroups(2, timeout=timedelta(seconds=seconds + 1))
        axes = *(mesh.data.parts or ()), as_axis(group, "of a user")
        calls += [(launch, axis) for axis in axes if axis.rank]

    def error_of(launch: Callable[[Axis], object], axis: Axis) -> str:
        with pytest.raises(RuntimeError) as error:
            launch(axis)
        return str(error.value)

    with ThreadPoolExecutor(6) as pool:
        errors = list(pool.map(error_of, *zip(*calls, strict=True))) if calls else []
    store = shared_store()
    if store.add("arrived", 1) == mesh.size:
        store.set("end", "")
    store.wait(["end"], timedelta(seconds=LIMIT_SECONDS))
    return errors


def gather_ones(axis: Axis) -> None:
    axis.all_gather(torch.ones(1), out=torch.ones(2)).wait()


def sum_ones(axis: Axis) -> None:
    axis.all_reduce(torch.ones(1), out=torch.ones(1)).wait()


def test_collectives_along_every_axis_end_at_the_time_limit_of_the_world_or_of_a_users_group():
    found = run_ranks(4, collectives_without_a_peer, 2, timeout_seconds=LIMIT_SECONDS)
    limits = [[re.findall(r"\d+ms", error) for error in errors] for errors in found]
    of_each = [[], [["2000ms"], ["3000ms"]], [["2000ms"]], [["2000ms"], ["2000ms"], ["3000ms"]]]
    assert limits == [2 * of_rank for of_rank in of_each]


def errors_of_a_forked_process() -> list[str]:
    """Return what a process raises that is forked while a collective is under way: like a worker of a DataLoader."""
    axis, out = Mesh.create(tensor_size=1).data, torch.empty(2)
    barrier, pending = HostBarrier(axis), axis.all_gather(torch.ones(1), out=out)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(LIMIT_SECONDS)
        for call in (lambda: axis.broadcast(out), pending.wait, lambda: barrier.wait("reads")):
            try:
                call()
            except RuntimeError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as errors:
        found = errors.read().replace(str(child), "CHILD").replace(str(os.getpid()), "PARENT").splitlines()
    os.waitpid(child, 0)
    pending.wait()
    assert_equal(out, torch.ones(2))
    return found


def test_a_process_that_was_forked_from_a_rank_raises_instead_of_communicating():
    for rank, errors in enumerate(run_ranks(2, errors_of_a_forked_process, timeout_seconds=LIMIT_SECONDS)):
        assert len(errors) == 3
        for error in errors:
            assert error.startswith(f"process CHILD was forked from process PARENT, rank {rank} of the data axis, and ")


def check_names_of_both_torch_versions() -> None:
    """Check the collectives for NCCL under their names of torch 2.11 and of 2.13, as far as this torch has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda _group: "nccl")
        check_collectives(COLLECTIVES)
        for name in ("all_gather_single", "reduce_scatter_single"):
            patch.delattr(dist, name, raising=False)
        check_collectives(COLLECTIVES)


def test_collectives_work_under_the_older_names():
    run_ranks(3, check_names_of_both_torch_versions)


def logged_events() -> tuple[list[CommEvent], int, int]:
    """Return (events, bytes sent, bytes of receive buffers) of each collective once, of the reduce-scatter thrice."""
    mesh = Mesh.create(tensor_size=1)
    axis, mesh.log.keeps_events = mesh.data, True
    shard, full = torch.zeros(NUMEL), torch.zeros(NUMEL * axis.size)
    axis.all_gather(shard, out=full).wait()
    with mesh.log.during("backward"):
        for _ in range(3):
            axis.reduce_scatter(full, out=shard).wait()
    axis.all_reduce(shard.half(), out=shard.half()).wait()
    axis.broadcast(full).wait()
    return mesh.log.events, mesh.log.wire_bytes("data"), axis.pairwise.received.num_bytes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_collective_is_logged_with_its_whole_message(num_ranks):
    full_bytes = 4 * NUMEL * num_ranks
    expected = [
        CommEvent("all_gather", "data", num_ranks, full_bytes, torch.float32, "setup"),
        *[CommEvent("reduce_scatter", "data", num_ranks, full_bytes, torch.float32, "backward")] * 3,
        CommEvent("all_reduce", "data", num_ranks, 2 * NUMEL, torch.float16, "setup"),
        CommEvent("broadcast", "data", num_ranks, full_bytes, torch.float32, "setup"),
    ]
    share = (num_ranks - 1) / num_ranks
    for events, sent, received_bytes in run_ranks(num_ranks, logged_events):
        assert events == expected
        assert sent == (1 + 3 + 1) * full_bytes * share + 2 * 2 * NUMEL * share
        assert received_bytes == full_bytes  # one buffer, used three times
