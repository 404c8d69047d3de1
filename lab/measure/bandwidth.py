"""Measurements of the links and the devices of a job, made by all ranks at once, as in training."""

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lab.measure.curves import Curve
from parallel.mesh import Axis, Mesh
from parallel.world import World

COLLECTIVES = "all_reduce", "all_gather", "reduce_scatter"
LINK_BYTES = 8 * 2**20  # of a message between two ranks
MESSAGE_BYTES = 2**10, 2**14, 2**18, 2**22, 2**25  # by which times of collectives are measured
MESSAGE_BYTES_OF_GPUS = (2**28,)  # and these, too
SHARD_BYTES = 2**20  # of each rank's part of a collective, at least: with less, latency is measured
COMPUTED_SIZE = 512  # of the square matrices whose product is computed before a measured message
SECONDS_EACH = 0.5  # for which a measured action is repeated
SECONDS_EACH_SIZE = 0.1  # for which a collective is repeated with messages of one size
DEVICE_SIZES = {"cpu": (1024, 2**23), "cuda": (8192, 2**28)}  # of a measured product, and elements of a measured copy
KERNELS_TOGETHER = 100  # of which the shortest time of a kernel is the mean
FEWEST_REPEATS, MOST_REPEATS = 3, 50
LEAST_ESTIMATE = 1e-7  # seconds, of an action that the clock does not see
BYTES_PER_GB = 1e9  # in reports and in cluster files
Measurement = Callable[[], object]
Found = TypeVar("Found")


@dataclass(frozen=True)
class LinkRate:
    """The bytes per second that each rank sends in a collective of a group, or over the link between two ranks."""

    axis: str
    what: str  # the name of the collective, or "link"
    ranks: tuple[int, ...]  # in the whole job
    bytes_per_second: float


@dataclass(frozen=True)
class DeviceRate:
    """The rates of one device; `host_bytes_per_second` is that of a copy to host memory."""

    flops_per_second: float  # of a product in half precision
    memory_bytes_per_second: float
    host_bytes_per_second: float
    kernel_seconds: float


@dataclass(frozen=True)
class Rates:
    """The rates that one rank has measured: those of its device, and of links inside nodes and across."""

    node: str
    rank: int
    device_name: str
    device: DeviceRate
    links: list[LinkRate]

    @classmethod
    def of(cls, world: World, device: DeviceRate, links: list[LinkRate]) -> Self:
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        return cls(socket.gethostname(), world.rank, name, device, links)


def gathered(own: Found, world: World) -> list[Found]:
    """Return what all ranks have found, by rank, on the first one; on the others an empty list."""
    found = [own] * world.size if world.is_first else None
    if dist.is_initialized():
        dist.gather_object(own, found)
    return found or []


def message_bytes(num_ranks: int) -> int:
    """Return the size of the messages by which the collectives of a group are measured."""
    return max(LINK_BYTES, num_ranks * SHARD_BYTES)


def measure_axis(axis: Axis, device: torch.device) -> list[LinkRate]:
    """Measure the three collectives of training, on all groups of the axis at once.

    Returns the rates of a group on its first rank, and an empty list on its others.
    """
    if axis.size == 1:
        return []
    numel = message_bytes(axis.size) // 2 // axis.size * axis.size
    full = torch.ones(numel, dtype=torch.bfloat16, device=device)
    shard = torch.ones(numel // axis.size, dtype=torch.bfloat16, device=device)
    rates = []
    for name in COLLECTIVES:
        seconds = measured_seconds(partial(_collect, axis, name, full, shard), device, axis)
        assert axis.log.last is not None
        rates.append(LinkRate(axis.name, name, _members(axis), axis.log.last.wire_bytes / seconds))
    return rates if axis.rank == 0 else []


def measure_links(axis: Axis, device: torch.device, takes_part: bool = True) -> list[LinkRate]:
    """Measure the links between neighbours in the axis's ring, in both directions at once.

    Three rounds measure disjoint pairs of neighbours, so that no rank exchanges messages with two others at a time. The
    first rank of a pair returns its rate. A rank with `takes_part` False calls the barriers only, so that the others
    have the network for themselves.
    """
    if axis.size == 1:
        return []
    rates, members = [], _members(axis)
    sent, received = (torch.ones(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    for number in (0, 1, 2) if axis.size > 2 else (0,):
        for first, second in [pair for pair in _pairs(axis.size, number) if axis.rank in pair and takes_part]:
            peer = second if axis.rank == first else first
            seconds = measured_seconds(partial(_exchange, axis, peer, sent, received), device, pair=(axis, peer))
            if axis.rank == first:
                ranks = tuple(sorted((members[axis.rank], members[peer])))
                rates.append(LinkRate(axis.name, "link", ranks, LINK_BYTES / seconds))
        dist.barrier()  # of all ranks: no pair of the next round may start while one of this round is measured
    return rates


def measure_sizes(axis: Axis, device: torch.device) -> list[Curve]:
    """Measure the collectives of training with messages of several sizes, on all groups of the axis at once.

    A curve is over the bytes that a rank sends. On a CPU each collective follows a computation, as in a step: its
    time is then also that of waiting for the slower ranks, and of waking gloo's threads.
    """
    if axis.size == 1:
        return []
    matrix = torch.ones(COMPUTED_SIZE, COMPUTED_SIZE)
    before = partial(torch.mm, matrix, matrix) if device.type == "cpu" else None
    curves, messages = [], MESSAGE_BYTES + (MESSAGE_BYTES_OF_GPUS if device.type == "cuda" else ())
    for name in COLLECTIVES:
        sizes, seconds = [], []
        for num_bytes in messages:
            full = torch.ones(num_bytes // 4 // axis.size * axis.size, device=device)
            shard = full.chunk(axis.size)[axis.rank]  # in place, as in training
            # gloo's reduce-scatter exchanges messages like an all-gather and then adds them up by kernels, which a dry
            # run counts as such.
            operation = "all_gather" if axis.takes_receive_buffers and name != "all_reduce" else name
            action = partial(_collect, axis, operation, full, shard)
            seconds.append(measured_seconds(action, device, axis, budget=SECONDS_EACH_SIZE, before=before))
            assert axis.log.last is not None
            action()
            sizes.append(float(axis.log.last.wire_bytes))
        curves.append(Curve(f"{name} of {axis.size}", tuple(sizes), tuple(seconds)))
    return curves


def _collect(axis: Axis, operation: str, full: Tensor, shard: Tensor) -> None:
    match operation:
        case "all_reduce":
            axis.all_reduce(full, out=full).wait()
        case "all_gather":
            axis.all_gather(shard, out=full).wait()
        case "reduce_scatter":
            axis.reduce_scatter(full, out=shard).wait()


def latency(axis: Axis, device: torch.device) -> float:
    """Return the seconds of one step of a ring, measured by an all-reduce of one number."""
    if axis.size == 1:
        return 0.0
    word = torch.zeros(1, device=device)
    return measured_seconds(lambda: axis.all_reduce(word, out=word).wait(), device, axis) / (2 * (axis.size - 1))


def measure_device(device: torch.device) -> DeviceRate:
    """Measure a matrix product, a copy in memory, a copy to the host, and the shortest kernel."""
    size, numel = DEVICE_SIZES[device.type]
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.ones(numel, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(source)
    on_host = torch.empty_like(source, device="cpu", pin_memory=device.type == "cuda")
    word = torch.zeros(1, device=device)
    num_bytes = 2 * numel
    return DeviceRate(
        2 * size**3 / measured_seconds(lambda: a @ b, device),
        2 * num_bytes / measured_seconds(lambda: copy.copy_(source), device),
        num_bytes / measured_seconds(lambda: on_host.copy_(source), device),
        measured_seconds(lambda: [word.add_(1) for _ in range(KERNELS_TOGETHER)], device) / KERNELS_TOGETHER,
    )


def _pairs(size: int, number: int) -> list[tuple[int, int]]:
    """Return set `number` of three sets of disjoint pairs of neighbours, which together are all links of a ring.

    Set 0 has the pairs that begin at an even rank, set 1 those that begin at an odd rank. In a ring of odd size the
    pair of its last and its first rank is in neither, and makes set 2.
    """
    if number == 2:
        return [(size - 1, 0)] if size % 2 else []
    return [(first, (first + 1) % size) for first in range(number, size - size % 2, 2)]


def _exchange(axis: Axis, peer: int, sent: Tensor, received: Tensor) -> None:
    messages = [dist.P2POp(dist.irecv, received, group=axis.group, group_peer=peer)]
    messages += [dist.P2POp(dist.isend, sent, group=axis.group, group_peer=peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def _members(axis: Axis) -> tuple[int, ...]:
    assert axis.group is not None
    return tuple(dist.get_process_group_ranks(axis.group))


def measured_seconds(
    action: Measurement,
    device: torch.device,
    axis: Axis | None = None,
    pair: tuple[Axis, int] | None = None,
    budget: float | None = None,
    counts_waiting: bool = False,
    before: Measurement | None = None,
) -> float:
    """Return the median seconds of an action that is repeated for about `budget` seconds, by default half a second.

    If the action communicates along `axis`, or with the other rank of `pair`, these ranks repeat it equally often. On a
    CPU, the time of any other action is its processor time, unless its waits count.

    The time of `before`, which runs before each action, does not count. With it, the mean is returned: then ranks wait
    for each other, seldom but long, and a step has many such waits.
    """
    # The processor time of a CPU's kernels is the same if other programs run on the machine. Messages are waited for.
    is_kernel_of_cpu = device.type == "cpu" and axis is None and pair is None and not counts_waiting
    clock = time.thread_time if is_kernel_of_cpu else time.perf_counter
    whole = action if before is None else lambda: (before(), action())
    for _ in range(2):  # the first call opens connections: the time of the second one is used
        once = _timed(whole, device, clock)
    # The number of repeats must be the same on all ranks that communicate, or the last messages would never arrive. So
    # they compute it from the same estimate: the mean over the axis, or the longer time of the pair.
    estimate = torch.tensor(once, dtype=torch.float64, device=device)
    if axis is not None:
        axis.all_reduce(estimate, out=estimate).wait()
        estimate /= axis.size
    elif pair is not None:
        of_peer = torch.empty_like(estimate)
        _exchange(*pair, estimate, of_peer)
        estimate = torch.maximum(estimate, of_peer)
    repeats = (SECONDS_EACH if budget is None else budget) / max(estimate.item(), LEAST_ESTIMATE)
    num_repeats = max(FEWEST_REPEATS, min(MOST_REPEATS, int(repeats)))
    times = [_timed(action, device, clock, before) for _ in range(num_repeats)]
    return statistics.median(times) if before is None else statistics.fmean(times)


def _timed(
    action: Measurement, device: torch.device, clock: Callable[[], float], before: Measurement | None = None
) -> float:
    if before is not None:
        before()
    # The device is synchronized before the clock is read: first to finish earlier work, then to finish the action.
    synchronize(device)
    start = clock()
    action()
    synchronize(device)
    return clock() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_mesh(mesh: Mesh, device: torch.device) -> list[LinkRate]:
    """Measure the collectives and links along both axes. All ranks must call this; each returns a part of the rates."""
    rates = []
    for axis in (mesh.tensor, mesh.data):
        # All ranks wait before each measurement, because messages of the one before would slow it down.
        mesh.barrier()
        rates += measure_axis(axis, device)
        mesh.barrier()
        rates += measure_links(axis, device)
    return rates
