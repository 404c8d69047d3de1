"""Measurements of the links and the devices of a job, by all ranks at once, as training uses them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis, Mesh

MESSAGE_BYTES = 8 * 2**20
SECONDS_EACH = 0.5
MAX_REPEATS = 50
SLOW_LINK, SLOW_DEVICE = 0.7, 0.8  # of the median of the comparable ones
FAR_BELOW = 0.5  # of the rate in a cluster file
Measurement = Callable[[], object]


@dataclass(frozen=True)
class LinkRate:
    """The bytes per second that each rank sends between two ranks, or along a whole group."""

    axis: str
    what: str  # an operation, or "link"
    ranks: tuple[int, ...]
    bytes_per_second: float


@dataclass(frozen=True)
class DeviceRate:
    """The rates of one device; `host_bytes_per_second` is that of a copy to host memory."""

    rank: int
    flops_per_second: float  # of a product in half precision
    memory_bytes_per_second: float
    host_bytes_per_second: float
    kernel_seconds: float


def measure_axis(axis: Axis, device: torch.device) -> list[LinkRate]:
    """Measure the three collectives of training, on all groups at once.

    Returns the rates of this rank's group on its first rank, and an empty list on the others.
    """
    if axis.size == 1:
        return []
    numel = MESSAGE_BYTES // 2 // axis.size * axis.size
    full = torch.ones(numel, dtype=torch.bfloat16, device=device)
    shard = torch.ones(numel // axis.size, dtype=torch.bfloat16, device=device)
    operations: dict[str, Measurement] = {
        "all_reduce": lambda: axis.all_reduce(full, out=full).wait(),
        "all_gather": lambda: axis.all_gather(shard, out=full).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(full, out=shard).wait(),
    }
    rates = []
    for name, operation in operations.items():
        seconds = _seconds(operation, device, axis)
        assert axis.log.last is not None
        rates.append(LinkRate(axis.name, name, _members(axis), axis.log.last.wire_bytes / seconds))
    return rates if axis.rank == 0 else []


def measure_links(axis: Axis, device: torch.device, takes_part: bool = True) -> list[LinkRate]:
    """Measure the links between neighbours in the axis's ring, in both directions at once.

    A rank is in one pair at a time. The lower rank of a pair returns its rate. With `takes_part` False a rank only
    joins the barriers, and leaves the network to the others.
    """
    if axis.size == 1:
        return []
    rates, members = [], _members(axis)
    sent, received = (torch.ones(MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    for first in (0, 1, 2) if axis.size > 2 else (0,):
        pairs = _pairs(axis.size, first)
        for mine in [pair for pair in pairs if axis.rank in pair and takes_part]:
            peer = mine[1] if axis.rank == mine[0] else mine[0]
            seconds = _seconds(partial(_exchange, axis, peer, sent, received), device, pair=(axis, peer))
            if axis.rank == mine[0]:
                ranks = tuple(sorted((members[axis.rank], members[peer])))
                rates.append(LinkRate(axis.name, "link", ranks, MESSAGE_BYTES / seconds))
        dist.barrier()
    return rates


def latency(axis: Axis, device: torch.device) -> float:
    """Return the seconds of one step of the ring in an all-reduce of one number."""
    if axis.size == 1:
        return 0.0
    word = torch.zeros(1, device=device)
    return _seconds(lambda: axis.all_reduce(word, out=word).wait(), device, axis) / (2 * (axis.size - 1))


def measure_device(rank: int, device: torch.device) -> DeviceRate:
    """Measure a matrix product, a copy in memory, a copy to the host, and the shortest kernel."""
    is_gpu = device.type == "cuda"
    size, numel = (8192, 2**28) if is_gpu else (1024, 2**23)
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.ones(numel, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(source)
    on_host = torch.empty_like(source, device="cpu", pin_memory=is_gpu)
    word = torch.zeros(1, device=device)
    num_bytes = 2 * numel
    return DeviceRate(
        rank,
        2 * size**3 / _seconds(lambda: a @ b, device),
        2 * num_bytes / _seconds(lambda: copy.copy_(source), device),
        num_bytes / _seconds(lambda: on_host.copy_(source, non_blocking=True), device),
        _seconds(lambda: [word.add_(1) for _ in range(100)], device) / 100,
    )


def slow_links(rates: Sequence[LinkRate], expected: dict[str, float]) -> list[LinkRate]:
    """Return the links far below the median of the same operation and axis, or below what is `expected` of the axis."""
    slow = []
    for rate in rates:
        like = [r.bytes_per_second for r in rates if (r.axis, r.what) == (rate.axis, rate.what)]
        limit = max(SLOW_LINK * statistics.median_high(like), FAR_BELOW * expected.get(rate.axis, 0.0))
        if rate.bytes_per_second < limit:
            slow.append(rate)
    return slow


def slow_devices(rates: Sequence[DeviceRate], expected_flops: float) -> list[DeviceRate]:
    """Return the devices below the median, or far below `expected_flops` per second."""
    usual = statistics.median_high(rate.flops_per_second for rate in rates)
    limit = max(SLOW_DEVICE * usual, FAR_BELOW * expected_flops)
    return [rate for rate in rates if rate.flops_per_second < limit]


def _pairs(size: int, first: int) -> list[tuple[int, int]]:
    """Return one of three sets of disjoint pairs of neighbours, which together make the ring of an axis.

    The sets are pairs that begin at even ranks (0), at odd ranks (1), and the pair that closes a ring of odd size (2).
    """
    if first == 2:
        return [(size - 1, 0)] if size % 2 else []
    return [(a, (a + 1) % size) for a in range(first, size - size % 2, 2)]


def _exchange(axis: Axis, peer: int, sent: Tensor, received: Tensor) -> None:
    messages = [dist.P2POp(dist.irecv, received, group=axis.group, group_peer=peer)]
    messages += [dist.P2POp(dist.isend, sent, group=axis.group, group_peer=peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def _members(axis: Axis) -> tuple[int, ...]:
    assert axis.group is not None
    return tuple(dist.get_process_group_ranks(axis.group))


def _seconds(
    action: Measurement, device: torch.device, axis: Axis | None = None, pair: tuple[Axis, int] | None = None
) -> float:
    """Return the median seconds of an action, repeated for half a second; ranks that act together agree how often."""
    for _ in range(2):  # the first call makes connections: only the second one is used
        once = _timed(action, device)
    longest = torch.tensor(once, dtype=torch.float64, device=device)
    if axis is not None:
        axis.all_reduce(longest, out=longest).wait()
        longest /= axis.size
    elif pair is not None:
        theirs = torch.empty_like(longest)
        _exchange(*pair, longest, theirs)
        longest = torch.maximum(longest, theirs)
    num_repeats = max(3, min(MAX_REPEATS, int(SECONDS_EACH / longest.item())))
    return statistics.median(_timed(action, device) for _ in range(num_repeats))


def _timed(action: Measurement, device: torch.device) -> float:
    # The device is synchronized before each reading of the clock: first earlier work, then the action, has finished.
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_mesh(mesh: Mesh, device: torch.device) -> list[LinkRate]:
    """Measure the collectives along both axes, and the links of which this rank is the lower end. For all ranks."""
    rates = []
    for axis in (mesh.tensor, mesh.data):
        # Barriers keep the measurements apart: messages of one would slow down another.
        mesh.barrier()
        rates += measure_axis(axis, device)
        mesh.barrier()
        rates += measure_links(axis, device)
    return rates
