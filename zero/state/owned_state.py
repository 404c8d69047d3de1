"""What one rank owns, as named tensors to save, and the same out of the saved states of any other layout.

"3.master.640"         buffer 3: the weights from element 640 on, to the end of a shard, in the master's type
"3.exp_avg.640"        the optimizer's state for the piece of a parameter that begins there; 0-dim: for all of it
"buffer.NAME", "loss_scale.NAME", "num_skipped"
"""

from typing import Any

import torch
from torch import Tensor

from parallel.tensor.layers import split_dims
from zero.bucket import Bucket
from zero.elementwise import Piece
from zero.engine import ZeroDataParallel
from zero.flat import FlatParameters
from zero.layout import Span
from zero.optimizer import ZeroOptimizer
from zero.state.saved_state import MASTER, SavedFile, SavedState, TensorRank


def owned_state(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """The tensors themselves, no copies: save them before the next step. Replicas own the same."""
    numbers = {bucket: number for number, flat in enumerate(model.flats) for bucket in flat.buckets}
    state = {f"{number}.{MASTER}.{bucket.shard.start}": bucket.master for bucket, number in numbers.items()}
    for bucket in optimizer.buckets:
        for piece in optimizer.pieces_of(bucket):
            for kind, value in optimizer.inner.state.get(piece.param, {}).items():
                if isinstance(value, Tensor):
                    state[f"{numbers[bucket]}.{kind}.{bucket.shard.start + piece.elements.start}"] = value
    return state


def common_state(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """What every rank has to itself: the module's buffers, and how the loss scale and the skipped steps stand."""
    state = {f"buffer.{name}": buffer for name, buffer in model.module.named_buffers()}
    if optimizer.loss_scale.is_dynamic:
        state |= {f"loss_scale.{name}": tensor for name, tensor in optimizer.loss_scale.state().items()}
    return state | {"num_skipped": optimizer.num_skipped}


@torch.no_grad()
def load_owned_state(model: ZeroDataParallel, optimizer: ZeroOptimizer, saved: SavedState, tensor: TensorRank) -> None:
    """Read what this rank owns, whatever layout wrote it; every rank's full parameters follow.

    `tensor`: this rank's place along the axis that cuts the model. Parameters' names and full shapes must be the saved.
    """
    trainable = set(optimizer.buckets)
    for flat in model.flats:
        flat.reshard()  # before its values change: a transient full buffer would keep the old ones
        for bucket in flat.buckets:
            if bucket in trainable:
                _load_optimizer_state(optimizer, flat, bucket, saved, tensor)
            _load_weights(flat, bucket, saved, tensor)
            bucket.params.owned.copy_(bucket.master)  # returns early if both are the same memory
            bucket.params.all_gather_updated().wait()


@torch.no_grad()
def load_common_state(model: ZeroDataParallel, optimizer: ZeroOptimizer, file: SavedFile) -> None:
    """From the file of the rank whose place this one takes. A loss scale that was not saved, or is fixed, stays."""
    for name, tensor in common_state(model, optimizer).items():
        if name in file.entries:
            tensor.copy_(file.tensor(name))


def group_counters(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """Numbers that a torch optimizer keeps per parameter group beside its settings, such as apex's step counter."""
    return [
        {k: v for k, v in group.items() if k not in optimizer.inner.defaults and isinstance(v, (int, float))}
        for group in optimizer.inner.param_groups
    ]


def describe_state(model: ZeroDataParallel, data_size: int, tensor_size: int) -> dict[str, Any]:
    """For `SavedState`: where any element of any parameter lies in the files of `data_size` x `tensor_size` ranks.

    The same on every rank, and no larger for more of them.
    """
    return {
        "data_size": data_size,
        "tensor_size": tensor_size,
        "split_dims": split_dims(model.module),
        "buffers": [flat.layout.describe() for flat in model.flats],
    }


def _load_weights(flat: FlatParameters, bucket: Bucket, saved: SavedState, tensor: TensorRank) -> None:
    for span, part in flat.layout.pieces(bucket.shard):
        out = bucket.owned_part(bucket.master, part)
        saved.read(span.name, MASTER, _within(span, part), out=out, tensor=tensor)


def _load_optimizer_state(
    optimizer: ZeroOptimizer, flat: FlatParameters, bucket: Bucket, saved: SavedState, tensor: TensorRank
) -> None:
    pieces = {piece.elements.start: piece for piece in optimizer.pieces_of(bucket)}
    for span, part in flat.layout.pieces(bucket.shard):
        if piece := pieces.get(part.start - bucket.shard.start):  # none: a parameter that the optimizer does not have
            state = optimizer.inner.state[piece.param]
            for kind in saved.state_kinds(span.name):
                scalar = saved.scalar(span.name, kind)
                if scalar is None:
                    state[kind] = torch.empty_like(piece.param, dtype=_state_dtype(saved, span.name, kind, piece))
                    saved.read(span.name, kind, _within(span, part), out=state[kind], tensor=tensor)
                else:
                    is_on_host = not optimizer.inner.defaults.get("fused")  # torch's step counters
                    state[kind] = scalar.to("cpu" if is_on_host else piece.param.device, copy=True)


def _state_dtype(saved: SavedState, name: str, kind: str, piece: Piece) -> torch.dtype:
    """What was kept in the type of the weights still is; what was not (8-bit moments, say) stays what it was."""
    dtype = saved.dtype(name, kind)
    return piece.param.dtype if dtype == saved.dtype(name) else dtype


def _within(span: Span, part: range) -> range:
    """Elements of the buffer as elements of the parameter."""
    return range(part.start - span.elements.start, part.stop - span.elements.start)
