"""The bytes of memory that one rank's model states and buffers really occupy, beside what `zero/formulas` promises."""

from collections.abc import Iterable

from torch import Tensor

from zero.engine import ZeroDataParallel
from zero.formulas.memory import ModelStates
from zero.offload.placement import Placement
from zero.optimizer import ZeroOptimizer
from zero.stage import Lifetime


def resident_states(
    model: ZeroDataParallel, optimizer: ZeroOptimizer, placement: Placement = Placement.ACCELERATOR
) -> ModelStates:
    """Return the bytes of model states that are allocated now in one of the memories, each storage counted once.

    A torch optimizer allocates its moments in the first step: before it, `moments` is 0.
    """
    here = [bucket for bucket in optimizer.buckets if bucket.optimizer_placement is placement]
    pieces = [piece for bucket in here for piece in optimizer.pieces_of(bucket)]
    states = (optimizer.inner.state.get(piece.param, {}) for piece in pieces)
    values = (value for state in states for value in state.values())
    return ModelStates(
        parameters=_num_bytes(
            tensor for bucket in model.buckets for tensor in bucket.params.resident_tensors(placement)
        ),
        gradients=_num_bytes(
            tensor for bucket in optimizer.buckets for tensor in bucket.grads.resident_tensors(placement)
        ),
        master=_num_bytes(bucket.master for bucket in here if bucket.has_own_master),
        moments=_num_bytes(value for value in values if isinstance(value, Tensor) and value.dim() > 0),
    )


def buffer_bytes(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, int]:
    """Return the bytes of each buffer of constant size (C_B).

    They depend on `zero.bucket_numel` and never on the number of the model's parameters.
    """
    return {
        "staged gradients": model.reducer.staging.num_bytes,
        "received messages": model.shard_axis.received.num_bytes,
        "gradient cast": _num_bytes(optimizer.cast_buffers.values()),
    }


def gathered_bytes(model: ZeroDataParallel, prefetch_numel: int) -> int:
    """Return the most bytes of transient parameters that are unsharded at once.

    These are the parameters of two units, one inside the other, and those that are gathered ahead. The bound depends
    on the largest layer, not on the number of layers.
    """
    transient = [flat.full for flat in model.flats if flat.lifetime is Lifetime.TRANSIENT]
    itemsize = max((full.element_size() for full in transient), default=0)
    numels = sorted((full.numel() for full in transient), reverse=True)
    return itemsize * min(sum(numels), sum(numels[:2]) + prefetch_numel)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages, each counted once however many tensors are views of it."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
