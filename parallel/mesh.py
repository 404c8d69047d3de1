"""The mesh: named axes, each carrying the collectives that run along it. Every byte between ranks passes this door.

A verb writes `out`, returns at once, and gives a `Handle` to wait on before `out` is read or its inputs overwritten.
An axis of size 1 communicates nothing and still writes `out`, so no caller ever asks how large an axis is.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel.errors import ConfigError
from parallel.instruments.comm_log import CommEvent, CommLog
from parallel.instruments.memory_tracker import TensorKind, tagged


class Handle:
    """A collective under way: the steps still to be taken before its output may be read."""

    def __init__(self, *steps: Callable[[], object]):
        self._steps = deque(steps)

    def wait(self) -> None:
        """On a GPU the stream waits, not the host."""
        while self._steps:
            self._steps.popleft()()

    def then(self, launch: Callable[[], "Handle"]) -> "Handle":
        """Launch a collective that reads this one's output: now if it is there already, else when waited for."""
        return Handle(self.wait, lambda: launch().wait()) if self._steps else launch()


class ReceiveBuffers:
    """Memory for messages on their way in, used again: fresh pages for each would cost as much as sending it.

    As many buffers a type as were on their way at once, each for the longest message so far."""

    def __init__(self) -> None:
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)

    def take(self, like: Tensor) -> Tensor:
        """At least as long as `like`."""
        free = self._free[like.dtype]
        if free and free[-1].numel() >= like.numel():
            return free.pop()
        if free:
            free.pop(0)
        return tagged(TensorKind.BUFFERS, like.new_empty(like.numel()))

    def put_back(self, buffer: Tensor) -> None:
        free = self._free[buffer.dtype]
        free.append(buffer)
        free.sort(key=Tensor.numel)

    def clear(self) -> None:
        """Of what waits for a message; the next ones get memory of their own."""
        self._free.clear()

    @property
    def num_bytes(self) -> int:
        """Of the buffers that wait for a message; none is on its way between steps."""
        return sum(b.numel() * b.element_size() for free in self._free.values() for b in free)


@dataclass(frozen=True)
class Axis:
    """The ranks that differ only in their place along one dimension of the mesh; `rank` is that place."""

    name: str
    size: int
    rank: int
    log: CommLog
    group: dist.ProcessGroup | None = None
    parts: "tuple[Axis, Axis] | None" = None  # (inner, outer): consecutive ranks, and those at the same place in them
    imitated_backend: str | None = None  # what a fake process group stands for
    received: ReceiveBuffers = field(default_factory=ReceiveBuffers, repr=False, compare=False)

    @classmethod
    def trivial(cls, name: str, log: CommLog | None = None) -> "Axis":
        """The axis of one rank: no process group, no traffic."""
        return cls(name, 1, 0, log or CommLog())

    def alone(self) -> "Axis":
        """This axis as seen by a rank without peers."""
        return replace(self, size=1, rank=0, group=None, parts=None)

    @property
    def has_peers(self) -> bool:
        """Whether other processes are there to answer; those of the fake backend are not."""
        return self.size > 1 and dist.get_backend(self.group) != "fake"

    def device_to_travel_from(self, tensor: Tensor) -> torch.device:
        """Where a copy of the tensor must lie to be communicated: NCCL takes nothing from host memory."""
        is_nccl = self.size > 1 and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else tensor.device

    def all_gather(self, shard: Tensor, *, out: Tensor) -> Handle:
        """(n, ...) -> (size * n, ...), contiguous. In place where `shard` is this rank's part of `out`."""
        if self.size == 1:
            return _copy(shard, out)
        event = self.log.record("all_gather", self.name, self.size, out)
        if self._is_gloo:
            return self._timed(event, self._send_to_all(shard, out))
        gather = _first_named("all_gather_single", "all_gather_into_tensor")
        work = gather(_flat(out), _flat(shard), group=self.group, async_op=True)
        return self._timed(event, Handle(work.wait))

    def reduce_scatter(self, full: Tensor, *, out: Tensor) -> Handle:
        """(size * n, ...) -> (n, ...), summed, contiguous. In place where `out` is this rank's part of `full`."""
        if self.size == 1:
            return _copy(full, out)
        event = self.log.record("reduce_scatter", self.name, self.size, full)
        if self._is_gloo:
            return self._timed(event, self._exchange_and_sum(full, out))
        scatter = _first_named("reduce_scatter_single", "reduce_scatter_tensor")
        work = scatter(_flat(out), _flat(full), group=self.group, async_op=True)
        return self._timed(event, Handle(work.wait))

    def all_reduce(self, tensor: Tensor, *, out: Tensor) -> Handle:
        """Summed over the axis, in place where `out` is `tensor`."""
        out.copy_(tensor)  # returns early where both are the same memory
        if self.size == 1:
            return Handle()
        event = self.log.record("all_reduce", self.name, self.size, out)
        return self._timed(event, Handle(dist.all_reduce(out, group=self.group, async_op=True).wait))

    def broadcast(self, tensor: Tensor) -> Handle:
        """Every rank of the axis receives the contiguous tensor of its first rank."""
        if self.size == 1:
            return Handle()
        event = self.log.record("broadcast", self.name, self.size, tensor)
        as_bytes = tensor.view(-1).view(torch.uint8)  # gloo lacks some types
        work = dist.broadcast(as_bytes, group=self.group, group_src=0, async_op=True)
        return self._timed(event, Handle(work.wait))

    @property
    def _is_gloo(self) -> bool:
        backend = dist.get_backend(self.group)
        return (self.imitated_backend if backend == "fake" else backend) == "gloo"

    def _timed(self, event: CommEvent, collective: Handle) -> Handle:
        return Handle(partial(self.log.waits_for, event), collective.wait, partial(self.log.has, event))

    def values_of_first(self, tensor: Tensor) -> Tensor:
        """What the axis's first rank has in the tensor, contiguous, where it can travel. May overwrite `tensor`."""
        values = tensor.to(self.device_to_travel_from(tensor)).contiguous()
        self.broadcast(values).wait()
        return values

    def least(self, number: int) -> int:
        """Of the axis's ranks; waits for them, and for the device. Without peers to answer, this rank's."""
        if not self.has_peers:
            return number
        own = torch.tensor([number])
        own = own.to(self.device_to_travel_from(own))
        numbers = own.new_empty(self.size)
        self.all_gather(own, out=numbers).wait()
        return int(numbers.min())

    def _send_to_all(self, shard: Tensor, out: Tensor) -> Handle:
        """gloo's own all-gather receives in a fresh buffer and copies; straight into place it is four times faster."""
        shards = out.view(-1).chunk(self.size)
        shards[self.rank].copy_(shard.view(-1))  # returns early where both are the same memory
        return self._exchange([shard.view(-1)] * self.size, shards)

    def _exchange_and_sum(self, full: Tensor, out: Tensor) -> Handle:
        """gloo's own reduce-scatter sends as much as an all-reduce; an exchange and a local sum send half."""
        buffer = self.received.take(full)
        received = buffer[: full.numel()]
        sent, terms = full.view(-1).chunk(self.size), received.chunk(self.size)
        terms[self.rank].copy_(sent[self.rank])
        exchanged = self._exchange(sent, terms)

        def add_up() -> None:
            _add_up(received.view(self.size, -1), out.view(-1))
            self.received.put_back(buffer)

        return Handle(exchanged.wait, add_up)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Handle:
        """`sent[k]` to every other rank k, which fills `received[k]`. Pairs of ranks match in the order of calls."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        messages = [dist.P2POp(dist.irecv, received[peer], group=self.group, group_peer=peer) for peer in peers]
        messages += [dist.P2POp(dist.isend, sent[peer], group=self.group, group_peer=peer) for peer in peers]
        return Handle(*(work.wait for work in dist.batch_isend_irecv(messages)))


@dataclass(frozen=True)
class Mesh:
    """rank = data.rank * tensor.size + tensor.rank: a tensor group is a run of consecutive ranks, inside a node."""

    data: Axis
    tensor: Axis
    log: CommLog

    @classmethod
    def create(
        cls,
        tensor_size: int,
        device_type: str = "cpu",
        log: CommLog | None = None,
        shard_size: int | None = None,
        imitated_backend: str | None = None,
    ) -> "Mesh":
        """Lay the axes over torch's default process group, or over this process alone where there is none.

        With `shard_size` the data axis has parts, "shard" of that size and "replica" across. `imitated_backend` is what
        a fake process group stands for. Raises ConfigError.
        """
        log = log or CommLog()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if tensor_size < 1 or world_size % tensor_size:
            divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"parallel.tensor_size={tensor_size} does not divide the {world_size} ranks; "
                f"choose {', '.join(divisors)}, or start another number of ranks"
            )
        data_size = world_size // tensor_size
        if shard_size is not None and (shard_size < 1 or data_size % shard_size):
            raise ConfigError(
                f"parallel.shard_size={shard_size} does not divide the {data_size} data-parallel ranks; "
                "choose a divisor, or null to shard over all of them"
            )
        if world_size == 1:
            return cls(Axis.trivial("data", log), Axis.trivial("tensor", log), log)
        inner = shard_size or data_size
        sizes = {"replica": data_size // inner, "shard": inner, "tensor": tensor_size}
        sizes = {name: size for name, size in sizes.items() if size > 1}  # a rank alone needs no group, nor its threads
        groups = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        def axis(name: str, group: dist.ProcessGroup, parts: tuple[Axis, Axis] | None = None) -> Axis:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            return Axis(name, size, rank, log, group, parts, imitated_backend)

        def part(name: str) -> Axis:
            return axis(name, groups.get_group(name)) if name in sizes else Axis.trivial(name, log)

        shard, replica, tensor = part("shard"), part("replica"), part("tensor")
        if replica.size == 1:
            data = replace(shard, name="data", parts=(shard, replica) if shard_size else None)
        elif shard.size == 1:
            data = replace(replica, name="data", parts=(shard, replica))
        else:
            data = axis("data", groups["replica", "shard"]._flatten("data").get_group(), (shard, replica))
        return cls(data, tensor, log)

    @property
    def rank(self) -> int:
        return self.data.rank * self.tensor.size + self.tensor.rank

    @property
    def size(self) -> int:
        return self.data.size * self.tensor.size

    def barrier(self) -> None:
        """Wait until every rank has come here. Never in a training step."""
        if dist.is_initialized():
            dist.barrier()


def _add_up(terms: Tensor, out: Tensor) -> None:
    """(size, n) -> (n,), in the order of ranks; half types are added in fp32 and rounded once."""
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)  # the same bits as the sum, several times faster
    else:
        torch.sum(terms, dim=0, out=out)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _copy(source: Tensor, out: Tensor) -> Handle:
    out.copy_(source)
    return Handle()


def _first_named(*names: str) -> Callable:
    """The first of `names` that this torch has: collectives were renamed between 2.11 and 2.13."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
