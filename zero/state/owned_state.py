"""Names the state that one rank owns, to save it, and loads what a rank owns from the saved state of any layout.

"3.master.640"         a shard of the master weights: the part of flat buffer 3 that begins at its element 640
"3.exp_avg.640"        optimizer state of the piece of a parameter that begins at that element; 0-dim if it is a number
"matrix.NAME.0.left"    state of the first matrix of a parameter, on the rank that computes it
"buffer.NAME"          a buffer of the module; this and the following are not sharded
"loss_scale.NAME"      a tensor of the dynamic loss scale
"num_skipped"          the number of steps that were skipped
"""

from typing import Any

import torch
from torch import Tensor

from parallel.tensor.split_parameters import split_dims
from zero.buckets.bucket import Bucket
from zero.buckets.flat import FlatParameters
from zero.engine import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.optimizers.adamw8bit import AdamW8bit
from zero.partition.layout import Span
from zero.state.description import describe_layout
from zero.state.saved_state import MASTER, SavedFile, SavedState, TensorRank, elements_per_value
from zero.step.pieces import Piece


def owned_state(model: ZeroDataParallel, optimizer: ZeroOptimizer | None) -> dict[str, Tensor]:
    """Return this rank's shards of the master weights and its optimizer state, if there is one, by name.

    Ranks that differ only along the replica axis own the same state. The tensors are not copies: save them before the
    next step.
    """
    if optimizer is None:
        model.wait_for_updates()
    else:
        optimizer.take_changes()
    numbers = {bucket: number for number, flat in enumerate(model.flats) for bucket in flat.buckets}
    state = {f"{number}.{MASTER}.{bucket.shard.start}": bucket.master for bucket, number in numbers.items()}
    if optimizer is None:
        return state
    for bucket in optimizer.buckets:
        for piece in optimizer.pieces_of(bucket):
            for kind, value in optimizer.inner.state.get(piece.param, {}).items():
                if isinstance(value, Tensor):
                    state[f"{numbers[bucket]}.{kind}.{bucket.shard.start + piece.elements.start}"] = value
    return state | optimizer.matrices.states()


def common_state(model: ZeroDataParallel, optimizer: ZeroOptimizer | None) -> dict[str, Tensor]:
    """Return the state that is not sharded: the module's buffers, the loss scale and the number of skipped steps."""
    buffers = model.module.named_buffers()
    # As complex parameters are stored: by pairs of real elements.
    state = {f"buffer.{name}": torch.view_as_real(b) if b.is_complex() else b for name, b in buffers}
    if optimizer is None:
        return state
    if optimizer.loss_scale.is_dynamic:
        state |= {f"loss_scale.{name}": tensor for name, tensor in optimizer.loss_scale.state().items()}
    return state | {"num_skipped": optimizer.num_skipped}


@torch.no_grad()
def load_owned_state(
    model: ZeroDataParallel, optimizer: ZeroOptimizer | None, saved: SavedState, tensor: TensorRank
) -> None:
    """Load this rank's shards from a state that any layout has saved, and all-gather parameters that persist.

    All ranks call it. `tensor` is this rank's position along the tensor axis. The model must have the names and full
    shapes of the saved parameters.
    """
    trainable = set(optimizer.buckets) if optimizer else ()
    with model.loading_masters():
        for flat in model.flats:
            for bucket in flat.buckets:
                if optimizer is not None and bucket in trainable:
                    _load_optimizer_state(optimizer, flat, bucket, saved, tensor)
                _load_weights(flat, bucket, saved, tensor)
    if optimizer is not None:
        saved.load_by_name(optimizer.matrices.states())
        optimizer.matrices.take_loaded()


@torch.no_grad()
def load_common_state(model: ZeroDataParallel, optimizer: ZeroOptimizer | None, file: SavedFile) -> None:
    """Read the state that is not sharded from the file of one saved rank.

    A tensor that the file does not contain keeps its value. The loss scale is loaded only if it was dynamic when it was
    saved and is dynamic now.
    """
    file.load_present(common_state(model, optimizer))


def group_counters(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """Return, for each parameter group, its numbers that are not settings, such as the step counter of apex's Adam."""
    return [
        {k: v for k, v in group.items() if k not in optimizer.inner.defaults and isinstance(v, (int, float))}
        for group in optimizer.inner.param_groups
    ]


def describe_state(model: ZeroDataParallel, data_size: int, tensor_size: int) -> dict[str, Any]:
    """Return a description, for JSON, with which `SavedState` finds any element of any parameter in the ranks' files.

    The description is the same on each of the `data_size` x `tensor_size` ranks, and its size does not depend on their
    number.
    """
    return {
        "data_size": data_size,
        "tensor_size": tensor_size,
        "split_dims": split_dims(model.module),
        "buffers": [describe_layout(flat.layout) for flat in model.flats],
    }


def _load_weights(flat: FlatParameters, bucket: Bucket, saved: SavedState, tensor: TensorRank) -> None:
    for span, part in flat.layout.spans_in(bucket.shard):
        out = bucket.owned_part(bucket.master, part)
        saved.read(span.name, MASTER, _within(span, part), out=out, tensor=tensor)


def _load_optimizer_state(
    optimizer: ZeroOptimizer, flat: FlatParameters, bucket: Bucket, saved: SavedState, tensor: TensorRank
) -> None:
    pieces = {piece.elements.start: piece for piece in optimizer.pieces_of(bucket)}
    for span, part in flat.layout.spans_in(bucket.shard):
        piece = pieces.get(part.start - bucket.shard.start)
        if piece is None:  # the parameter is in none of the optimizer's groups
            continue
        state = optimizer.inner.state[piece.param]
        state.clear()  # the checkpoint may be older than the parameter's first update
        of_elements: dict[str, Tensor] = {}  # values of blocks that are not those of this run
        for kind in saved.state_kinds(span.name):
            scalar = saved.scalar(span.name, kind)
            if scalar is None and (numel := elements_per_value(kind)) > 1:
                is_alike = saved.has_blocks_of(span.name, tensor)
                read, count = (saved.read_blocks, -(-len(part) // numel)) if is_alike else (saved.read, len(part))
                values = piece.param.new_empty(count, dtype=saved.dtype(span.name, kind))
                read(span.name, kind, _within(span, part), out=values, tensor=tensor)
                (state if is_alike else of_elements)[kind] = values
            elif scalar is None:
                state[kind] = torch.empty_like(piece.param, dtype=_state_dtype(saved, span.name, kind, piece))
                saved.read(span.name, kind, _within(span, part), out=state[kind], tensor=tensor)
            else:
                # A fused optimizer of torch expects step counters on the device, any other one on the host.
                is_fused = optimizer.inner.defaults.get("fused")
                state[kind] = scalar.to(piece.param.device if is_fused else "cpu")
        if of_elements:
            assert isinstance(optimizer.inner, AdamW8bit)
            optimizer.inner.requantize(piece.param, of_elements)


def _state_dtype(saved: SavedState, name: str, kind: str, piece: Piece) -> torch.dtype:
    """Return the dtype in which to load one kind of optimizer state of a piece.

    This is the piece's own dtype if the state was saved in the dtype of the master weights. Any other state, such as
    8-bit moments, keeps the dtype in which it was saved.
    """
    dtype = saved.dtype(name, kind)
    return piece.param.dtype if dtype == saved.dtype(name) else dtype


def _within(span: Span, part: range) -> range:
    """Convert elements of the flat buffer to elements of the parameter."""
    return range(part.start - span.elements.start, part.stop - span.elements.start)
