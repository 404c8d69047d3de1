"""Deferred execution: collectives and copies on side streams run only when they are waited for, as late as on a GPU.

Inside `with deferred():` streams and events are simulated (see `tests/simulated_streams.py`), so that the project's own
code decides what waits for what. A collective goes the way of NCCL: each communicator is a stream, which
first waits for the stream on which the collective is launched. It is a collective of gloo in truth, run late.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from parallel.mesh import Axis, _first_named
from parallel.torch_internals import schema_of
from tests.ranks import run_ranks
from tests.simulated_streams import Action, Output, Race, Region, Stream, Streams, Work
from zero.memory import placement
from zero.state.writer import HostCopies


@contextmanager
def deferred() -> Iterator[Streams]:
    """Defer collectives and copies on side streams. Raises Race at the end if some work was never waited for."""
    streams = Streams()
    streams.late_operations = partial(LateOperations, streams)
    with ExitStack() as patches:
        for patch in (*_collectives(streams), *_memory(streams), *_doors(streams)):
            patches.enter_context(patch)
        yield streams
        if streams.pending:
            raise Race(f"never waited for: {', '.join(work.name for work in streams.pending)}")


def run_late(num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call a function on several ranks as `run_ranks` does, under deferred execution."""
    return run_ranks(num_ranks, _late, function, *args, **options)


def _late(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with deferred():
        return function(*args, **options)


class LateOperations(TorchDispatchMode):
    """A dispatch mode that launches the operations of a side stream instead of running them.

    Memory that they allocate returns to the same stream, so that later operations there may use it at once.
    """

    def __init__(self, streams: Streams, stream: Stream):
        super().__init__()
        self._streams, self._stream = streams, stream
        self._allocated: set[int] = set()  # storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._streams.is_running or not tensors or function.is_view or _is_alias(function):
            return function(*args, **kwargs)
        if any("Tensor" not in str(returned.type) for returned in schema_of(function).returns):
            self._stream.synchronize()  # the host reads a value
            return function(*args, **kwargs)
        written = _written(function, args, kwargs)
        result = None if written else function(*args, **kwargs)  # its memory; the values are computed again
        self._allocated |= {out.untyped_storage()._cdata for out in tree_leaves(result) if isinstance(out, Tensor)}
        outputs = [(self._region(out), updates) for out, updates in _outputs(written, result)]
        inputs = [tensor for tensor in tensors if not any(tensor is out for out, _ in written)]
        regions = [self._region(tensor) for tensor in inputs]
        if function is torch.ops.aten.copy_.default and outputs[0][0].is_same(self._region(args[1])):
            return args[0]  # a copy onto itself does nothing
        # An output that shares memory with an input is read before it is written.
        outputs = [Output(out, is_updated=updates or any(out.overlaps(r) for r in regions)) for out, updates in outputs]
        call = _call(function, args, kwargs, inputs, [out for out, _ in written])
        work = Work(str(function), regions, outputs, call)
        self._stream.launch(work)
        if not written:
            return result
        return written[0][0] if len(written) == 1 else tuple(out for out, _ in written)

    def _region(self, tensor: Tensor) -> Region:
        storage = tensor.untyped_storage()
        is_kept = storage._cdata in self._allocated or any(region.is_in(storage) for region in self._streams.on_host)
        return Region(tensor, is_kept=is_kept)


class HostAllocations(TorchDispatchMode):
    """A dispatch mode under which the project allocates memory of the host."""

    def __init__(self, streams: Streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = function(*args, **(kwargs or {}))
        self._streams.on_host.append(Region(tensor, is_kept=False))
        return tensor


def _is_alias(function: Any) -> bool:
    """Return whether the result is the argument itself, such as that of `detach`."""
    infos = [argument.alias_info for argument in schema_of(function).arguments]
    return any(info is not None and not info.is_write for info in infos)


def _written(function: Any, args: tuple, kwargs: dict) -> list[tuple[Tensor, bool]]:
    """Return the arguments that an operation writes, each with whether it is read before."""
    written = []
    for number, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs[argument.name]
            is_only_written = argument.is_out or function.overloadpacket.__name__ in ("copy_", "fill_", "zero_")
            written.extend((tensor, not is_only_written) for tensor in tree_leaves(value))
    return written


def _outputs(written: list[tuple[Tensor, bool]], result: Any) -> list[tuple[Tensor, bool]]:
    return written or [(tensor, False) for tensor in tree_leaves(result)]


def _call(function: Any, args: tuple, kwargs: dict, inputs: list[Tensor], written: list[Tensor]) -> Action:
    """Return the action of an operation, which puts the tensors of the moment in the place of its arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    numbers = {id(tensor): number for number, tensor in enumerate([*inputs, *written])}
    places = {place: numbers[id(leaf)] for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # nothing here keeps them allocated
    is_in_place = bool(written)

    def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        tensors, now = [*inputs, *outputs], list(leaves)
        for place, number in places.items():
            now[place] = tensors[number]
        args, kwargs = tree_unflatten(now, spec)
        result = function(*args, **kwargs)
        for out, value in () if is_in_place else zip(outputs, tree_leaves(result), strict=True):
            out.copy_(value)

    return act


class DeferredWork:
    """The object that torch.distributed returns for a collective that it has launched."""

    def __init__(self, streams: Streams, work: Work):
        self._streams, self._work = streams, work

    def wait(self) -> bool:
        self._streams.current_stream.wait([self._work])
        return True

    def is_completed(self) -> bool:
        return self._work.has_run


class Communicators:
    """The streams of the process groups, and torch's collectives, which run there late."""

    def __init__(self, streams: Streams):
        self._streams, self._of_group = streams, {}
        self._gather = _first_named("all_gather_single", "all_gather_into_tensor")
        self._scatter = _first_named("reduce_scatter_single", "reduce_scatter_tensor")
        self._reduce, self._broadcast, self._exchange = dist.all_reduce, dist.broadcast, dist.all_to_all_single

    def all_gather(self, out: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        parts = out.view(-1).chunk(dist.get_world_size(group))
        rank = dist.get_rank(group)
        # In place, this rank's part is not written.
        is_in_place = parts[rank].data_ptr() == own.data_ptr()
        written = [part for number, part in enumerate(parts) if not is_in_place or number != rank]

        def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            if is_in_place:
                outputs.insert(rank, inputs[0])
            everything = inputs[0].new_empty(inputs[0].numel() * len(parts))
            self._gather(everything, inputs[0].clone(), group=group)
            for output, part in zip(outputs, everything.chunk(len(parts)), strict=True):
                output.copy_(part)

        return self._launch("all_gather", group, async_op, [own.view(-1)], [(part, False) for part in written], act)

    def reduce_scatter(self, out: Tensor, full: Tensor, op: Any = None, group: Any = None, async_op: bool = False):
        own = full.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        is_in_place = own.data_ptr() == out.data_ptr()

        def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._scatter(total := torch.empty_like(outputs[0]), inputs[0].clone(), group=group)
            outputs[0].copy_(total)

        return self._launch("reduce_scatter", group, async_op, [full.view(-1)], [(out, is_in_place)], act)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False):
        def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._reduce(outputs[0], op, group=group)

        return self._launch("all_reduce", group, async_op, [], [(tensor, True)], act)

    def all_to_all(self, out: Tensor, sent: Tensor, *numels: list, group: Any = None, async_op: bool = False):
        def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._exchange(*outputs, *inputs, *numels, group=group)

        return self._launch("all_to_all", group, async_op, [sent], [(out, False)], act)

    def broadcast(self, tensor: Tensor, src: Any = None, group: Any = None, async_op: bool = False, group_src=None):
        source = dist.get_group_rank(group, src) if group_src is None else group_src
        is_source = dist.get_rank(group) == source

        def act(inputs: list[Tensor], outputs: list[Tensor]) -> None:
            self._broadcast(*inputs, *outputs, group=group, group_src=source)

        inputs, outputs = ([tensor], []) if is_source else ([], [(tensor, False)])
        return self._launch("broadcast", group, async_op, inputs, outputs, act)

    def _launch(self, name: str, group: Any, async_op: bool, inputs: list, outputs: list, act: Callable) -> Any:
        stream = self._of_group.setdefault(group or dist.group.WORLD, Stream(self._streams))
        stream.wait_stream(self._streams.current_stream)
        inputs = [Region(tensor, is_kept=True) for tensor in inputs]
        outputs = [Output(Region(tensor, is_kept=True), is_updated=updated) for tensor, updated in outputs]
        work = DeferredWork(self._streams, stream.launch(Work(name, inputs, outputs, act)))
        if async_op:
            return work
        work.wait()
        return None


def _collectives(streams: Streams) -> Iterator[Any]:
    through = Communicators(streams)
    functions = {
        "all_gather_into_tensor": through.all_gather,
        "all_gather_single": through.all_gather,
        "reduce_scatter_tensor": through.reduce_scatter,
        "reduce_scatter_single": through.reduce_scatter,
        "all_reduce": through.all_reduce,
        "all_to_all_single": through.all_to_all,
        "broadcast": through.broadcast,
    }
    for name, function in functions.items():
        yield mock.patch.object(dist, name, function, create=True)
    # The axis calls torch's own collectives, as it does on NCCL.
    yield mock.patch.object(Axis, "_is_gloo", False)


def _memory(streams: Streams) -> Iterator[Any]:
    resize, allocating = torch.UntypedStorage.resize_, placement.allocating

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        if num_bytes < storage.nbytes():
            streams.before_free(storage)
        return resize(storage, num_bytes)

    @contextmanager
    def recorded(kind: Any, *, on_host: bool = False) -> Iterator[None]:
        with allocating(kind, on_host=on_host), HostAllocations(streams) if on_host else nullcontext():
            yield

    yield mock.patch.object(torch.UntypedStorage, "resize_", resize_)
    yield mock.patch.object(placement, "allocating", recorded)


def _doors(streams: Streams) -> Iterator[Any]:
    """Give the project the simulated streams, and let the snapshots of a saver land late."""
    take = HostCopies.take

    def take_late(copies: HostCopies, tensors: Any) -> Any:
        # The computation's stream, for once one that does not run at once: what is copied lands late on the host.
        with streams.new_stream().as_current():
            return take(copies, tensors)

    # Not in `parallel/mesh.py`, which would let a simulation replace the collectives of torch.
    yield mock.patch("parallel.streams.active_simulation", return_value=streams)
    yield mock.patch.object(HostCopies, "take", take_late)
