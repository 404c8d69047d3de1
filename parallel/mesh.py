"""The mesh: named axes, each with the collectives that run along it. A run communicates only through this file.

A collective returns at once, with a `Work`. Wait for it before `out` is read or an input is overwritten. An axis of
size 1 communicates nothing and still writes `out`, so callers never test the size of an axis.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel.comm_log import CommEvent, CommLog
from parallel.pairwise import Allocate, PairwiseMessages, new_buffer, sum_ranks
from parallel.store import with_reason
from parallel.streams import active_simulation
from parallel.torch_internals import flatten_mesh, take_default_timeout
from parallel.validation.errors import ConfigError

HALF_TYPES = torch.float16, torch.bfloat16
WaitCalls = tuple[Callable[[], object], Callable[[], object]]


def _do_nothing() -> None: ...


class Work:
    """An asynchronous collective: the steps that remain before its output may be read.

    `on_wait` are called before the first and after the last step.
    """

    def __init__(self, *steps: Callable[[], object], on_wait: WaitCalls = (_do_nothing, _do_nothing)):
        self._steps, self._on_wait = deque(steps), on_wait

    def wait(self) -> None:
        """Complete the collective. On a GPU the current stream waits for it, and the host does not."""
        if not self._steps:
            return
        before, after = self._on_wait
        before()
        self._complete()
        after()

    def then(self, launch: Callable[[], "Work"]) -> "Work":
        """Return a `Work` on this collective followed by one that reads its output.

        `launch` starts the second one: at once if this `Work` is already complete, otherwise when the result is
        waited for.
        """
        return Work(self.wait, lambda: launch().wait()) if self._steps else launch()

    def then_beside(self, launch: Callable[[], "Work"]) -> "Work":
        """Return the same as `then`, with the second one launched at once; call it on a stream that may wait.

        `on_wait` is called when the result is waited for.
        """
        self._complete()
        return Work(launch().wait, on_wait=self._on_wait)

    def followed_by(self, step: Callable[[], object], at_end: Callable[[], object]) -> "Work":
        """Return this `Work` with one more step; `at_end` is called when the result has been waited for."""
        before, after = self._on_wait

        def after_all() -> None:
            after()
            at_end()

        return Work(*self._steps, step, on_wait=(before, after_all))

    def _complete(self) -> None:
        while self._steps:
            # A step is removed before it is called, so that a second `wait`, even one inside a step, does not repeat
            # it.
            self._steps.popleft()()


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate of the mesh only; `rank` is this process's coordinate.

    `parts` is (inner, outer) if the axis is divided into groups of consecutive ranks: the inner axis runs inside a
    group, the outer one over the ranks at the same position of every group. `imitated_backend` is the backend that a
    fake process group stands for. `pairwise` has the collectives for gloo, and `pid` is the process of the axis.
    """

    name: str
    size: int
    rank: int
    log: CommLog
    group: dist.ProcessGroup | None = None
    parts: "tuple[Axis, Axis] | None" = None
    imitated_backend: str | None = None
    pairwise: PairwiseMessages = field(default_factory=PairwiseMessages, repr=False, compare=False)
    pid: int = field(default_factory=os.getpid, repr=False, compare=False)

    @classmethod
    def trivial(cls, name: str, log: CommLog | None = None, imitated_backend: str | None = None) -> "Axis":
        """Return an axis of one rank, which has no process group and no traffic."""
        return cls(name, 1, 0, log or CommLog(), imitated_backend=imitated_backend)

    def __deepcopy__(self, _memo: object) -> "Axis":
        return self  # its process group cannot be copied

    def without_peers(self) -> "Axis":
        """Return this axis reduced to the present rank, without a process group."""
        return replace(self, size=1, rank=0, group=None, parts=None, pairwise=PairwiseMessages())

    @property
    def has_peers(self) -> bool:
        """True if the axis has other ranks that exist; those of a fake process group do not."""
        return self.size > 1 and _backend_of(self.group) != "fake"

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the rank: threads of backends are not, and it hangs."""
        if (pid := os.getpid()) != self.pid:
            raise RuntimeError(
                f"process {pid} was forked from process {self.pid}, rank {self.rank} of the {self.name} axis, and "
                "cannot communicate; call the model in that process, and not in a worker of a DataLoader, for example"
            )

    def communication_device(self, tensor: Tensor) -> torch.device:
        """Return the device from which the tensor can be sent: NCCL does not send host memory."""
        is_nccl = self.size > 1 and _backend_of(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else tensor.device

    def all_gather(self, shard: Tensor, *, out: Tensor) -> Work:
        """Gather (n, ...) from every rank into `out`, (size * n, ...), contiguous.

        In place if `shard` is this rank's part of `out`.
        """
        if self.size == 1:
            return _copy(shard, out)
        event = self.log.record("all_gather", self.name, self.size, out)
        return self._launch(event, partial(self._all_gather, shard, out), shard, out)

    def gather_by_rank(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, (size, *shape), without a gradient. The current stream waits for them.

        `own` is on its `communication_device`.
        """
        of_ranks = own.new_empty(self.size, *own.shape)
        self.all_gather(own.detach().contiguous(), out=of_ranks).wait()
        return of_ranks

    def reduce_scatter(self, full: Tensor, *, out: Tensor, in_fp32: bool = False) -> Work:
        """Sum (size * n, ...) over the ranks and write this rank's part to `out`, (n, ...), contiguous.

        In place if `out` is this rank's part of `full`. With `in_fp32` terms of half precision are added in fp32 and
        rounded once, also by a backend that `rounds_at_each_rank`: it exchanges the terms, and a kernel adds them on
        the stream that waits.
        """
        if self.size == 1:
            return _copy(full, out)
        if in_fp32 and self.rounds_at_each_rank(full.dtype):
            return self.exchange(_flat(full), partial(sum_ranks, out=_flat(out)))
        event = self.log.record("reduce_scatter", self.name, self.size, full)
        return self._launch(event, partial(self._reduce_scatter, full, out), full, out)

    def exchange(self, full: Tensor, read: Callable[[Tensor], object]) -> Work:
        """Send rank k its part of (size * n,), and call `read` with this rank's part of all, (size, n), by rank.

        `read` runs when the result is waited for, on the stream that waits; the memory is a buffer of this axis.
        """
        if self.size == 1:
            return Work(partial(read, full.view(1, -1)))
        buffer, numels = self.pairwise.received.take(full), [full.numel() // self.size] * self.size
        received, total_numel = buffer[: full.numel()], self.size * full.numel()
        exchanged = self.all_to_all(full, numels, out=received, out_numels=numels, total_numel=total_numel)
        # Not right behind `read`, which may run on a side stream: the computation launches the next message.
        put_back = partial(self.pairwise.received.put_back, buffer)
        return exchanged.followed_by(partial(read, received.view(self.size, -1)), at_end=put_back)

    def all_reduce(self, tensor: Tensor, *, out: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Sum the tensor over the ranks into `out`, or reduce it by another `op`. In place if `out` is `tensor`."""
        if out is not tensor:
            out.copy_(tensor)  # returns early if both are the same memory
        if self.size == 1:
            return Work()
        event = self.log.record("all_reduce", self.name, self.size, out)
        return self._launch(event, lambda: dist.all_reduce(out, op, group=self.group, async_op=True).wait, out, out)

    def broadcast(self, tensor: Tensor) -> Work:
        """Overwrite the contiguous tensor of every rank with that of the first rank."""
        if self.size == 1:
            return Work()
        event = self.log.record("broadcast", self.name, self.size, tensor)
        as_bytes = tensor.view(-1).view(torch.uint8)  # gloo does not support every dtype
        launch = partial(dist.broadcast, as_bytes, group=self.group, group_src=0, async_op=True)
        return self._launch(event, lambda: launch().wait, as_bytes, as_bytes)

    def all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], *, out: Tensor, out_numels: Sequence[int], total_numel: int
    ) -> Work:
        """Send a part of the flat tensor to each rank, and write the parts that they send to `out`, by rank.

        `sent_numels` are the elements for each rank, `out_numels` those from each rank, and `total_numel` those that
        all ranks send, themselves included: the ranks may send different numbers, and 0.
        """
        if self.size == 1:
            return _copy(sent, out)
        numels = total_numel, sent.numel() - sent_numels[self.rank]
        event = self.log.record("all_to_all", self.name, self.size, sent, uneven_numels=numels)
        return self._launch(event, partial(self._all_to_all, sent, sent_numels, out, out_numels), sent, out)

    @property
    def backend(self) -> str | None:
        """The backend that communicates, or that a fake process group stands for; None if the axis has one rank."""
        if self.size == 1:
            return None
        backend = _backend_of(self.group)
        return self.imitated_backend if backend == "fake" else backend

    @property
    def takes_receive_buffers(self) -> bool:
        """True if each reduce-scatter holds a buffer as long as its message until it has been waited for."""
        return self._is_gloo

    def rounds_at_each_rank(self, dtype: torch.dtype) -> bool:
        """Return whether the backend adds in the type of the message, which has half precision: NCCL's rings do."""
        return self.size > 1 and not self._is_gloo and dtype in HALF_TYPES

    @property
    def _is_gloo(self) -> bool:
        return self.backend == "gloo"

    def _launch(self, event: CommEvent, launch: Callable[[], Callable[[], object]], read: Tensor, out: Tensor) -> Work:
        """Launch a collective that reads one tensor and writes another, maybe the same."""
        self.check_process()
        simulation = active_simulation()
        if simulation is not None:
            launch = partial(simulation.collective, self.group, event, launch, read, out)
        wait = partial(with_reason, with_reason(launch))
        return Work(wait, on_wait=(partial(self._begin_wait, event), partial(self.log.record_wait_end, event)))

    def _begin_wait(self, event: CommEvent) -> None:
        self.check_process()
        self.log.record_wait_start(event)

    def _all_gather(self, shard: Tensor, out: Tensor) -> Callable[[], object]:
        if self._is_gloo:
            return self.pairwise.all_gather(shard, out)
        gather = _first_named("all_gather_single", "all_gather_into_tensor")
        return gather(_flat(out), _flat(shard), group=self.group, async_op=True).wait

    def _reduce_scatter(self, full: Tensor, out: Tensor) -> Callable[[], object]:
        if self._is_gloo:
            return self.pairwise.reduce_scatter(full, out)
        scatter = _first_named("reduce_scatter_single", "reduce_scatter_tensor")
        return scatter(_flat(out), _flat(full), group=self.group, async_op=True).wait

    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], out: Tensor, out_numels: Sequence[int]
    ) -> Callable[[], object]:
        if self._is_gloo:
            parts, own_parts = sent.split(list(sent_numels)), out.split(list(out_numels))
            own_parts[self.rank].copy_(parts[self.rank])
            return self.pairwise.exchange(parts, own_parts)
        numels = list(out_numels), list(sent_numels)
        return dist.all_to_all_single(out, sent, *numels, group=self.group, async_op=True).wait

    def broadcast_copy(self, tensor: Tensor) -> Tensor:
        """Return the first rank's values of the tensor, contiguous, on its `communication_device`.

        May overwrite `tensor`. The current stream waits for the values.
        """
        values = tensor.to(self.communication_device(tensor)).contiguous()
        self.broadcast(values).wait()
        return values

    def min_over_ranks(self, number: int) -> int:
        """Return the minimum of `number` over the axis; `number` itself on an axis without peers.

        Blocks the host until all ranks have called it and the device has finished.
        """
        if not self.has_peers:
            return number
        own = torch.tensor(number)
        return int(self.gather_by_rank(own.to(self.communication_device(own))).min())


@dataclass(frozen=True)
class Mesh:
    """The grid of ranks: rank = data.rank * tensor.size + tensor.rank.

    A tensor group is a run of consecutive ranks, which a launcher places on one node. The ranks of `context` are
    consecutive ranks of the data axis, which have the same sequences.
    """

    data: Axis
    tensor: Axis
    log: CommLog
    context: Axis = field(default_factory=partial(Axis.trivial, "context"))

    @classmethod
    def create(
        cls,
        tensor_size: int,
        device_type: str = "cpu",
        log: CommLog | None = None,
        shard_size: int | None = None,
        imitated_backend: str | None = None,
        allocate: Allocate = new_buffer,
        context_size: int = 1,
    ) -> "Mesh":
        """Create the axes from the ranks of torch's default process group, or from this process alone if there is none.

        With `shard_size` the data axis has parts: "shard" of that size, and "replica" across the shard groups.
        `imitated_backend` is the backend that a fake process group stands for. `allocate` allocates the buffers in
        which messages are received. Raises ConfigError if a size does not divide the ranks.
        """
        log = log or CommLog()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        data_size = _data_size(world_size, tensor_size, shard_size, context_size)
        if world_size == 1:
            data = Axis.trivial("data", log, imitated_backend)
            return cls(data, replace(data, name="tensor"), log, replace(data, name="context"))
        inner = shard_size or data_size
        sizes = {"replica": data_size // inner, "group": inner // context_size}
        sizes |= {"context": context_size, "tensor": tensor_size}
        sizes = {name: size for name, size in sizes.items() if size > 1}  # a group of one would start useless threads
        # Creating a group is a collective, so all ranks create theirs in the same order: first the groups of the mesh,
        # last the flattened ones below.
        groups = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        def axis(name: str, *dims: str) -> Axis:
            """Return the axis of the ranks that differ in these dims of the mesh."""
            own = tuple(dim for dim in dims if dim in sizes)
            if not own:
                return Axis.trivial(name, log, imitated_backend)
            group = groups.get_group(own[0]) if len(own) == 1 else flatten_mesh(groups[own], name)
            return replace(axis_of(group, name, log, allocate), imitated_backend=imitated_backend)

        replica, context, tensor = (axis(name, name) for name in ("replica", "context", "tensor"))
        shard = axis("shard", "group", "context")
        if replica.size == 1 or shard.size == 1:
            data = replace(shard if replica.size == 1 else replica, name="data")
        else:
            data = axis("data", "replica", "group", "context")
        return cls(replace(data, parts=(shard, replica) if shard_size else None), tensor, log, context)

    @property
    def num_batch_ranks(self) -> int:
        """The number of data-parallel ranks that have different sequences."""
        return self.data.size // self.context.size

    @property
    def batch_rank(self) -> int:
        """The number of this rank among those that have different sequences, the same for all ranks of a context."""
        return self.data.rank // self.context.size

    @property
    def rank(self) -> int:
        return self.data.rank * self.tensor.size + self.tensor.rank

    @property
    def size(self) -> int:
        return self.data.size * self.tensor.size

    @property
    def first_rank(self) -> int:
        """The rank in the job of the first one of the mesh."""
        if not dist.is_initialized():
            return 0
        group = self.data.group
        return (dist.get_rank() if group is None else dist.get_global_rank(group, 0)) - self.tensor.rank

    def barrier(self) -> None:
        """Wait until every rank of the mesh has called this. Not for use in a training step: it blocks the host."""
        for axis in (self.data, self.tensor):  # by both, each rank has waited for all
            if axis.size > 1:
                dist.barrier(axis.group)


def _backend_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of the backend that communicates between the devices of the job: a group may have several."""
    name = dist.get_backend(group)
    if name in ("gloo", "nccl", "fake"):
        return name
    names = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return names.get("cuda" if torch.cuda.is_available() else "cpu", name)


def axis_of(
    group: dist.ProcessGroup, name: str, log: CommLog, allocate: Allocate = new_buffer, *, keeps_limit: bool = False
) -> Axis:
    """Return the axis of the ranks of a process group, with the group's time limit or that of the default group."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return Axis.trivial(name, log)
    messages = PairwiseMessages(group, allocate, timedelta(0) if keeps_limit else take_default_timeout(group))
    return Axis(name, size, rank, log, group, pairwise=messages)


def _data_size(world_size: int, tensor_size: int, shard_size: int | None, context_size: int) -> int:
    """Return the size of the data axis. Raises ConfigError if one of the other sizes does not divide."""
    if tensor_size < 1 or world_size % tensor_size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"tensor_size={tensor_size} does not divide the {world_size} ranks; "
            f"choose {', '.join(divisors)}, or start another number of ranks"
        )
    data_size = world_size // tensor_size
    if shard_size is not None and (shard_size < 1 or data_size % shard_size):
        raise ConfigError(
            f"shard_size={shard_size} does not divide the {data_size} data-parallel ranks; "
            "choose a divisor, or null to shard over all of them"
        )
    divided = shard_size or data_size
    if context_size < 1 or divided % context_size:
        of_ranks = "data-parallel ranks" if shard_size is None else "ranks of a shard group"
        raise ConfigError(f"context_size={context_size} does not divide the {divided} {of_ranks}; choose a divisor")
    return data_size


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor with one dim. A view is created only if needed, because dry runs spend time on each."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _copy(source: Tensor, out: Tensor) -> Work:
    out.copy_(source)
    return Work()


def _first_named(*names: str) -> Callable:
    """Return the first function of torch.distributed that exists: two were renamed between torch 2.11 and 2.13."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
