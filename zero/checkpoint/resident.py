"""The bytes of memory that one rank's model states and buffers occupy, to compare with those of `zero/formulas`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

from torch import Tensor

from parallel.memory_kinds import Placement
from zero.core.buckets.bucket import Bucket
from zero.core.partition.stage import Lifetime
from zero.core.protocols.home import Home
from zero.data_parallel import ZeroDataParallel
from zero.formulas.memory import ModelStates
from zero.optimizer import ZeroOptimizer


def resident_states(
    model: ZeroDataParallel, optimizer: ZeroOptimizer, placement: Placement = Placement.ACCELERATOR
) -> ModelStates:
    """Return the bytes of model states that are allocated now in the memory `placement`, each storage counted once.

    A torch optimizer allocates its moments in the first step: before that step, `moments` is 0.
    """
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for bucket in model.buckets:
        for kind, tensor, _ in _allocated(bucket, optimizer, placement):
            found[kind].append(tensor)
    if placement is Placement.ACCELERATOR:
        found["moments"] += [
            state for update in optimizer.updates for state in update.present_states() if state.dim() > 0
        ]
    return ModelStates(**{field.name: _num_bytes(found[field.name]) for field in fields(ModelStates)})


def bytes_by_group(
    model: ZeroDataParallel,
    optimizer: ZeroOptimizer | None,
    group_of: Callable[[str], str],
    placement: Placement = Placement.ACCELERATOR,
) -> dict[str, Counter[str]]:
    """Return the bytes of each kind of state that are allocated now for each group of parameters.

    `group_of` returns the group of the parameter with a name. The kinds are those of `ModelStates`, and "unsharded" for
    transient parameters that are gathered. Without an optimizer only parameters are counted.
    """
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for flat in model.flats:
        for bucket in flat.buckets:
            for kind, tensor, elements in _allocated(bucket, optimizer, placement):
                for span, part in flat.layout.spans_in(elements):
                    found[group_of(span.name)][kind] += len(part) * tensor.element_size()
    return found


def _allocated(
    bucket: Bucket, optimizer: ZeroOptimizer | None, placement: Placement
) -> Iterator[tuple[str, Tensor, range]]:
    """Yield (kind, tensor, elements of the flat buffer that it has) of a bucket's states in the memory `placement`."""
    device, params = Placement.ACCELERATOR, bucket.params
    found = [("parameters", params.full, bucket.ranges.elements, device)]
    if not params.persists:
        found = [("parameters", params.rest, bucket.ranges.rest, placement_of(params.home))]
        found.append(("unsharded", params.full, bucket.ranges.elements, device))
    if params.cached is not None:
        found.append(("parameters", params.cached, bucket.ranges.rest, device))
    if optimizer is not None and bucket in optimizer.buckets:
        grads, start, at_home = bucket.grads, bucket.ranges.own.start, placement_of(bucket.home)
        if grads.path.persists and grads.staged is not None:
            found.append(("gradients", grads.staged, bucket.ranges.elements, device))
        if not grads.total.owns_staged:
            found.append(("gradients", grads.total.rest, bucket.ranges.rest, at_home))
        if bucket.master is not params.own:
            found.append(("master", bucket.master, bucket.ranges.own, at_home))
        for piece in optimizer.pieces_of(bucket):
            own = range(start + piece.elements.start, start + piece.elements.stop)
            for value in optimizer.states_of(piece).values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    found.append(("moments", value, own, at_home))
    for kind, tensor, elements, of_tensor in found:
        if of_tensor is placement and tensor.untyped_storage().nbytes():
            yield kind, tensor, elements


def placement_of(home: Home) -> Placement:
    """Return the memory in which a home is counted."""
    return Placement.HOST if home.is_apart else Placement.ACCELERATOR


def buffer_bytes(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, int]:
    """Return the bytes of each buffer of constant size (C_B), by name.

    They depend on `ZeroConfig.bucket_numel`, and not on the number of the model's parameters.
    """
    receiving = {axis.pairwise for transport in model.transports for axis in transport.reduced_along}
    return {
        "staged gradients": model.reducer.reductions.staging.num_bytes,
        "received messages": sum(pairwise.received.num_bytes for pairwise in receiving),
        "gradient cast": _num_bytes(optimizer.cast_buffers.values()),
        **{name: pool.num_bytes for home in model.homes.all for name, pool in home.pools.items()},
    }


def gathered_bytes(model: ZeroDataParallel, prefetch_numel: int) -> int:
    """Return the most bytes of transient parameters that are unsharded at the same time, if each unit has one buffer.

    These are the two largest flat buffers, for a unit inside another one, and the parameters that are prefetched. They
    depend on the largest layer, not on the number of layers.
    """
    transient = [flat.full for flat in model.flats if flat.lifetime is Lifetime.TRANSIENT]
    itemsize = max((full.element_size() for full in transient), default=0)
    numels = sorted((full.numel() for full in transient), reverse=True)
    return itemsize * min(sum(numels), sum(numels[:2]) + prefetch_numel)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once even if several tensors are views of it."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
