"""Projection of a recorded step on a cluster: its kernels and collectives replayed on lanes that run side by side.

    compute       kernel | kernel |  wait  | kernel ...   one kernel after the other, in the recorded order
    data          ......  reduce-scatter  |  all-gather   one lane per axis; a collective starts once it is launched
    tensor        ...  all-reduce |                       and the previous one on its lane has ended
    to, from host ....... copy |                          each way, at most one copy is ahead of the computation
    host          .............  update |                 updates of offloaded states by the node's processors

On a cluster of CPUs one task runs at a time, because all lanes are the work of the same cores.

Comments state every assumption at the line that makes it. A cluster's `gemm_fraction`, `memory_fraction` and
`node_fraction` are measured or calibrated; all other figures are from data sheets.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from lab.dryrun.costs.collectives import MeshShape, collective_seconds
from lab.dryrun.dry_run import Recording, begins_micro_batch
from lab.measure.cluster import ClusterSpec
from lab.measure.kernel_costs import host_seconds, kernel_seconds
from lab.observe.kernel_log import Kernel
from parallel.comm_log import CommEvent

OTHER_LANES = {"compute", "host", "to host", "from host"}  # all but those of the axes, on which collectives run


@dataclass(frozen=True)
class Task:
    """A kernel or collective on a lane; its times are seconds from the start of the step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass
class Timeline:
    """The tasks of a step that is projected on a cluster, and its duration.

    The tasks lack those of `num_left_out` micro-batches, which are like the last but one of `forwards`, their starts.
    """

    cluster: ClusterSpec
    tasks: list[Task]
    seconds: float
    forwards: tuple[float, ...] = ()
    num_left_out: int = 0

    @property
    def micro_batch_seconds(self) -> float:
        """The time between the starts of the last two forwards; 0 if there is one."""
        return self.forwards[-1] - self.forwards[-2] if len(self.forwards) > 1 else 0.0

    @property
    def shown_seconds(self) -> float:
        """The duration of a step of the tasks alone."""
        return self.seconds - self.num_left_out * self.micro_batch_seconds

    def busy_seconds(self, *, of_tasks: bool = False) -> dict[str, float]:
        """Return how long each lane is busy in the step, or in its tasks alone."""
        first, stop = self.forwards[-2:] if self.num_left_out and not of_tasks else (0.0, 0.0)
        busy: defaultdict[str, float] = defaultdict(float)
        for task in self.tasks:
            busy[task.lane] += (task.end - task.start) * (1 + self.num_left_out * (first <= task.start < stop))
        return dict(busy)


def project_recording(recording: Recording, cluster: ClusterSpec) -> Timeline:
    found = project(recording.kernels, recording.events, cluster, MeshShape.of(recording.state.mesh))
    seconds = found.seconds + recording.num_left_out * found.micro_batch_seconds
    return replace(found, seconds=seconds, num_left_out=recording.num_left_out)


def project(kernels: list[Kernel], events: list[CommEvent], cluster: ClusterSpec, shape: MeshShape) -> Timeline:
    """Return the timeline of a step.

    The times of `events` are numbers of kernels: the event at time n was between kernels n - 1 and n of `kernels`. The
    next step waits for a collective that is awaited at an earlier time than it was launched; the step is then the
    second one of two equal ones, and lasts until the computation has launched its last kernel.
    """
    lanes = _Lanes(is_single=cluster.device == "cpu")
    late = {
        number for number, event in enumerate(events) if event.awaited is not None and event.awaited < event.launched
    }
    if late:
        _replay(kernels, events, cluster, shape, lanes)
    start, num_before = lanes.free["compute"], len(lanes.tasks)
    lanes.host_is_done, lanes.forwards = start, []  # the host has waited for the device, as in a logged step
    _replay(kernels, events, cluster, shape, lanes)
    tasks = [replace(task, start=task.start - start, end=task.end - start) for task in lanes.tasks[num_before:]]
    end = lanes.free["compute"] - start if late else max((task.end for task in tasks), default=0.0)
    return Timeline(cluster, tasks, end, tuple(forward - start for forward in lanes.forwards))


class _Lanes:
    """Lanes of tasks that run at the same time, and the time at which each has ended so far."""

    def __init__(self, is_single: bool = False) -> None:
        self.is_single = is_single  # one task runs at a time: all lanes are the work of the same cores
        self.tasks: list[Task] = []
        self.free: defaultdict[str, float] = defaultdict(float)  # {lane: time at which its tasks so far have ended}
        self.host_is_done = 0.0  # with launching the kernels so far
        self.forwards: list[float] = []  # times at which the forwards of micro-batches have begun
        self.ends: dict[int, float] = {}  # {number of a collective: time at which it has ended the last time}

    def compute(self, name: str, seconds: float, share_beside_collectives: float) -> None:
        """Append a kernel of the computation, of which only a share is done while collectives run beside it."""
        start = max(self.free["compute"], self.host_is_done)
        beside = max((self.free[lane] for lane in self.free if lane not in OTHER_LANES), default=0.0) - start
        if beside > 0 and not self.is_single:
            done = min(seconds, beside * share_beside_collectives)
            seconds += done / share_beside_collectives - done
        self.run("compute", name, start, seconds)

    def run(self, lane: str, name: str, not_before: float, seconds: float) -> float:
        start = max(self.free.values(), default=0.0) if self.is_single else max(self.free[lane], not_before)
        self.free[lane] = start + seconds
        self.tasks.append(Task(lane, name, start, self.free[lane]))
        return self.free[lane]


def _replay(
    kernels: list[Kernel], events: list[CommEvent], cluster: ClusterSpec, shape: MeshShape, lanes: _Lanes
) -> None:
    free, slowest = lanes.free, cluster.slowest_of(shape.data_size * shape.tensor_size)
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
            elif event.axis == "shard" and event.op == "all_gather":  # of what the replica axis has gathered
                ready = max([ready, *(lanes.ends.get(n, 0.0) for n in waits[position] if _is_outer_gather(events[n]))])
            seconds = collective_seconds(event, cluster, shape)
            lanes.ends[number] = lanes.run(event.axis, event.op, ready, seconds)
        for number in waits.get(position, ()):
            if _is_outer_gather(events[number]):
                continue  # the stream waits that launches the gather along the shard axis
            free["compute"] = max(free["compute"], lanes.ends.get(number, 0.0))
        if position < len(kernels):
            kernel = kernels[position]
            if begins_micro_batch(kernels, position):
                lanes.forwards.append(free["compute"])
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
                lanes.host_is_done += 0.0 if lanes.is_single else cluster.launch_seconds
                seconds = kernel_seconds(kernel, cluster) * slowest
                lanes.compute(kernel.name, seconds, cluster.share_beside_collectives)


def _is_outer_gather(event: CommEvent) -> bool:
    return event.axis == "replica" and event.op == "all_gather"
