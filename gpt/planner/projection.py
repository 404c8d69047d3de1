"""Projection of a recorded step on a cluster: its kernels and collectives replayed on lanes that run side by side.

    compute       kernel | kernel |  wait  | kernel ...   one kernel after the other, in the recorded order
    data          ......  reduce-scatter  |  all-gather   one lane per axis; a collective starts once it is launched
    tensor        ...  all-reduce |                       and the previous one on its lane has ended
    to, from host ....... copy |                          each way, at most one copy is ahead of the computation
    host          .............  update |                 updates of offloaded states by the node's processors

Comments state every assumption at the line that makes it. A cluster's `gemm_fraction`, `memory_fraction` and
`node_fraction` are measured or calibrated; all other figures are from data sheets.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import ceil
from typing import Self

import torch

from gpt.planner.dry_run import Recording
from parallel.instruments.comm_log import CommEvent
from parallel.instruments.kernel_log import Kernel
from parallel.launch.cluster import ClusterSpec
from parallel.mesh import Mesh

# A matrix product is computed in tiles of this many rows and columns, one per multiprocessor at a time. The last round
# of tiles leaves some multiprocessors idle, and tiles at the border are computed in full.
TILE = 128
# Tensor cores are used if all sizes of a half-precision product are multiples of 8 (cuBLAS before version 11). Without
# them a GPU has a quarter of its half-precision rate (V100: 31 of 125 TFLOPs).
TENSOR_CORE_MULTIPLE, WITHOUT_TENSOR_CORES = 8, 1 / 4
IN_FULL_PRECISION = 1 / 8  # of the half-precision rate; V100: 15.7 of 125 TFLOPs


@dataclass(frozen=True)
class Task:
    """A kernel or collective on a lane; its times are seconds from the start of the step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class Timeline:
    """The tasks of a projected step, and its duration."""

    tasks: list[Task]
    seconds: float

    def busy_seconds(self) -> dict[str, float]:
        """Return the total duration of the tasks on each lane."""
        busy: defaultdict[str, float] = defaultdict(float)
        for task in self.tasks:
            busy[task.lane] += task.end - task.start
        return dict(busy)


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the mesh axes. A tensor group is a run of consecutive ranks, a data group has one rank of each."""

    data_size: int
    tensor_size: int
    shard_size: int | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """Return the shape of a mesh."""
        return cls(mesh.data.size, mesh.tensor.size, mesh.data.parts[0].size if mesh.data.parts else None)

    def stride(self, axis: str) -> int:
        """Return the difference between the global ranks of neighbours along the axis."""
        return {"tensor": 1, "replica": self.tensor_size * (self.shard_size or 1)}.get(axis, self.tensor_size)


def project_recording(recording: Recording, cluster: ClusterSpec) -> Timeline:
    """Return the timeline of a dry run's step on the cluster."""
    return project(recording.kernels, recording.events, cluster, MeshShape.of(recording.state.mesh))


def project(kernels: list[Kernel], events: list[CommEvent], cluster: ClusterSpec, shape: MeshShape) -> Timeline:
    """Return the timeline of a step.

    The times of `events` are numbers of kernels: the event at time n was between kernels n - 1 and n of `kernels`. The
    next step waits for a collective that is awaited at an earlier time than it was launched; the step is then the
    second one of two equal ones, and lasts until the computation has launched its last kernel.
    """
    lanes = _Lanes()
    late = {
        number for number, event in enumerate(events) if event.awaited is not None and event.awaited < event.launched
    }
    if late:
        _replay(kernels, events, cluster, shape, lanes)
    start, num_before = lanes.free["compute"], len(lanes.tasks)
    _replay(kernels, events, cluster, shape, lanes)
    tasks = [replace(task, start=task.start - start, end=task.end - start) for task in lanes.tasks[num_before:]]
    end = lanes.free["compute"] - start if late else max((task.end for task in tasks), default=0.0)
    return Timeline(tasks, end)


class _Lanes:
    """Lanes of tasks that run at the same time, and the time at which each has ended so far."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.free: defaultdict[str, float] = defaultdict(float)  # {lane: time at which its tasks so far have ended}
        self.ends: dict[int, float] = {}  # {number of a collective: time at which it has ended the last time}

    def run(self, lane: str, name: str, not_before: float, seconds: float) -> float:
        start = max(self.free[lane], not_before)
        self.free[lane] = start + seconds
        self.tasks.append(Task(lane, name, start, self.free[lane]))
        return self.free[lane]


def _replay(
    kernels: list[Kernel], events: list[CommEvent], cluster: ClusterSpec, shape: MeshShape, lanes: _Lanes
) -> None:
    """Append the tasks of one step to the lanes."""
    free = lanes.free
    launches: defaultdict[int, list[int]] = defaultdict(list)
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        launches[int(event.launched)].append(number)
        if event.awaited is not None:
            waits[int(event.awaited)].append(number)
    for position in range(len(kernels) + 1):
        for number in launches.get(position, ()):
            event = events[number]
            # It may send parameters that are still being copied from the host, so it starts after that copy.
            ready = max(free["compute"], free["from host"])
            if event.axis == "replica":  # it reduces what the shard axis has reduced
                ready = max(ready, free["shard"])
            seconds = collective_seconds(event, cluster, shape)
            lanes.ends[number] = lanes.run(event.axis, event.op, ready, seconds)
        for number in waits.get(position, ()):
            free["compute"] = max(free["compute"], lanes.ends.get(number, 0.0))
        if position < len(kernels):
            kernel = kernels[position]
            if kernel.is_transfer:
                lane = "to host" if kernel.to_host else "from host"
                # The computation waits for the previous copy on this lane before it launches this one.
                free["compute"] = max(free["compute"], free[lane])
                # A copy from the host may send the result of an update there, so it starts after the host's last task.
                ready = free["compute"] if kernel.to_host else max(free["compute"], free["host"])
                lanes.run(lane, kernel.name, ready, kernel.num_bytes / 2 / (cluster.host_gb_per_second * 1e9))
            elif kernel.is_on_host:
                lanes.run("host", kernel.name, max(free["compute"], free["to host"]), host_seconds(kernel, cluster))
            else:
                lanes.run("compute", kernel.name, 0.0, kernel_seconds(kernel, cluster))


def kernel_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of arithmetic or of memory traffic, whichever is longer, and at least that of a launch.

    Each byte that the kernel reads or writes is counted once.
    """
    moving = kernel.num_bytes / (cluster.memory_gb_per_second * 1e9 * cluster.memory_fraction)
    computing = 0.0
    if kernel.product:
        rate = cluster.peak_half_tflops * 1e12 * cluster.gemm_fraction * _share_of_peak(kernel, cluster)
        computing = kernel.flops / rate
    return max(moving, computing, cluster.kernel_seconds)


def host_seconds(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the time of an update on the host, which the memory bandwidth limits; a node's ranks share it equally."""
    return kernel.num_bytes / (cluster.host_memory_rate_of_a_gpu * 1e9)


def collective_seconds(event: CommEvent, cluster: ClusterSpec, shape: MeshShape) -> float:
    """Return the time of a ring algorithm at the rate of its slowest link.

    Each rank sends 1/n of the message to its neighbour n - 1 times, in an all-reduce twice as often.
    """
    stride = shape.stride(event.axis)
    num_hops = (2 if event.op == "all_reduce" else 1) * (event.group_size - 1)
    is_inside_a_node = stride * event.group_size <= cluster.gpus_per_node
    if is_inside_a_node:
        rate = cluster.intra_node_gb_per_second
    else:
        # All rings of one axis run at the same time and share a node's links; rings of different axes are assumed not
        # to overlap. A data-parallel ring uses one network card, as in Figure 4 of the paper. A tensor group, which has
        # all GPUs of a node, uses all of the node's cards, as the baseline does in Figure 2.
        num_rings = min(stride, cluster.gpus_per_node)
        rate = cluster.node_gb_per_second * cluster.node_fraction / num_rings
        if event.axis != "tensor":
            rate = min(rate, cluster.network_card_gb_per_second)
    return event.wire_bytes / (rate * 1e9) + num_hops * cluster.hop_seconds


def _share_of_peak(kernel: Kernel, cluster: ClusterSpec) -> float:
    """Return the share of the half-precision peak that tiles and the type of a matrix product allow."""
    assert kernel.product is not None
    batch, m, n, k = kernel.product
    num_tiles = batch * ceil(m / TILE) * ceil(n / TILE)
    num_rounds = ceil(num_tiles / cluster.num_multiprocessors)
    useful = batch * m * n / (num_rounds * cluster.num_multiprocessors * TILE**2)
    if kernel.dtype not in (torch.float16, torch.bfloat16):
        return useful * IN_FULL_PRECISION
    uses_tensor_cores = all(size % TENSOR_CORE_MULTIPLE == 0 for size in (m, n, k))
    return useful * (1.0 if uses_tensor_cores else WITHOUT_TENSOR_CORES)
