"""How long a recorded step would take on a cluster: its kernels and collectives replayed on lanes.

    compute     kernel | kernel |  wait  | kernel ...     one after the other, in the recorded order
    data        ......  reduce-scatter  |  all-gather     one lane an axis; a collective starts when it was launched
    tensor      ...  all-reduce |                         and the one before it on its lane has ended
    to, from host ....... copy |                          one copy each way is at most one ahead of the computation
    host        .............  update |                   what offloaded states take of the node's processors

Every assumption stands where it is made. A cluster's `gemm_fraction`, `memory_fraction` and `node_fraction` are
measured or calibrated; the rest is what data sheets say.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil

import torch

from parallel.instruments.comm_log import CommEvent
from parallel.instruments.kernel_log import Kernel
from parallel.launch.cluster import ClusterSpec

# A product runs as tiles of this many rows and columns, one on a multiprocessor at a time; the last round of tiles
# leaves some idle, and tiles at the border are computed in full.
TILE = 128
# Half-precision products need sizes that are multiples of 8 for tensor cores (cuBLAS before version 11); without them
# a GPU has a quarter of its half-precision rate (V100: 31 of 125).
TENSOR_CORE_MULTIPLE, WITHOUT_TENSOR_CORES = 8, 1 / 4
IN_FULL_PRECISION = 1 / 8  # V100: 15.7 of 125


@dataclass(frozen=True)
class Task:
    """Something on a lane, in seconds from the start of the step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class Timeline:
    tasks: list[Task] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max((task.end for task in self.tasks), default=0.0)

    def busy_seconds(self) -> dict[str, float]:
        busy: defaultdict[str, float] = defaultdict(float)
        for task in self.tasks:
            busy[task.lane] += task.end - task.start
        return dict(busy)


@dataclass(frozen=True)
class Grid:
    """How ranks lie on nodes: a tensor group is a run of consecutive ranks, a data group has one rank of each."""

    data_size: int
    tensor_size: int
    shard_size: int | None = None

    def ranks_apart(self, axis: str) -> int:
        """The distance of neighbours in a group."""
        return {"tensor": 1, "replica": self.tensor_size * (self.shard_size or 1)}.get(axis, self.tensor_size)


def project(kernels: list[Kernel], events: list[CommEvent], cluster: ClusterSpec, grid: Grid) -> Timeline:
    """`events` were recorded with a clock that counts `kernels`."""
    timeline = Timeline()
    free: defaultdict[str, float] = defaultdict(float)  # when a lane is done with what it has
    ends: dict[int, float] = {}  # of collectives
    launches: defaultdict[int, list[int]] = defaultdict(list)
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        launches[int(event.launched)].append(number)
        waits[int(event.awaited)].append(number)

    def run(lane: str, name: str, not_before: float, seconds: float) -> float:
        start = max(free[lane], not_before)
        free[lane] = start + seconds
        timeline.tasks.append(Task(lane, name, start, free[lane]))
        return free[lane]

    for position in range(len(kernels) + 1):
        for number in launches.get(position, ()):
            event = events[number]
            ready = max(free["compute"], free["from host"])  # it may pass on what is still coming from there
            ends[number] = run(event.axis, event.op, ready, collective_seconds(event, cluster, grid))
        for number in waits.get(position, ()):
            free["compute"] = max(free["compute"], ends[number])
        if position < len(kernels):
            kernel = kernels[position]
            if kernel.is_transfer:
                lane = "to host" if kernel.to_host else "from host"
                free["compute"] = max(free["compute"], free[lane])  # the copy before this one has been waited for
                # What the host has computed is sent when it is done.
                ready = free["compute"] if kernel.to_host else max(free["compute"], free["host"])
                run(lane, kernel.name, ready, kernel.num_bytes / 2 / (cluster.host_gb_per_second * 1e9))
            elif kernel.is_on_host:
                run("host", kernel.name, max(free["compute"], free["to host"]), host_seconds(kernel, cluster))
            else:
                run("compute", kernel.name, 0.0, kernel_seconds(kernel, cluster))
    return timeline


def kernel_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Limited by arithmetic or by memory, whichever takes longer; what is read or written travels once."""
    moving = kernel.num_bytes / (cluster.memory_gb_per_second * 1e9 * cluster.memory_fraction)
    computing = 0.0
    if kernel.product:
        rate = cluster.peak_half_tflops * 1e12 * cluster.gemm_fraction * _share_of_peak(kernel, cluster)
        computing = kernel.flops / rate
    return max(moving, computing, cluster.kernel_seconds)


def host_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """A node's ranks share the memory of its processors, which limits an optimizer's update."""
    return kernel.num_bytes / (cluster.host_memory_rate_of_a_gpu * 1e9)


def collective_seconds(event: CommEvent, cluster: ClusterSpec, grid: Grid) -> float:
    """A ring: each rank passes 1/n of the message on, n - 1 times (an all-reduce twice), at the slowest link's rate."""
    distance = grid.ranks_apart(event.axis)
    num_hops = (2 if event.op == "all_reduce" else 1) * (event.group_size - 1)
    is_inside_a_node = distance * event.group_size <= cluster.gpus_per_node
    if is_inside_a_node:
        rate = cluster.intra_node_gb_per_second
    else:
        # The rings of one axis run at the same time on all ranks and share a node's links; those of two axes are taken
        # as not meeting. A data-parallel ring has one network card, and a tensor group, which has all GPUs of a node,
        # all of its cards: Figure 4 of the paper shows the one, the baseline in Figure 2 the other.
        num_rings = min(distance, cluster.gpus_per_node)
        rate = cluster.node_gb_per_second * cluster.node_fraction / num_rings
        if event.axis != "tensor":
            rate = min(rate, cluster.network_card_gb_per_second)
    return event.wire_bytes / (rate * 1e9) + num_hops * cluster.hop_seconds


def _share_of_peak(kernel: Kernel, cluster: ClusterSpec) -> float:
    assert kernel.product is not None
    batch, m, n, k = kernel.product
    num_tiles = batch * ceil(m / TILE) * ceil(n / TILE)
    num_rounds = ceil(num_tiles / cluster.num_multiprocessors)
    useful = batch * m * n / (num_rounds * cluster.num_multiprocessors * TILE**2)
    if kernel.dtype not in (torch.float16, torch.bfloat16):
        return useful * IN_FULL_PRECISION
    fits = all(size % TENSOR_CORE_MULTIPLE == 0 for size in (m, n, k))
    return useful * (1.0 if fits else WITHOUT_TENSOR_CORES)
