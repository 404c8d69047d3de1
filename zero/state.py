"""What one rank owns, as named tensors to save and to load: weights, optimizer state, buffers.

"3.0.master"           buffer 3, window 0: this rank's shard of the weights, in the master's type
"3.0.exp_avg.2"        the optimizer's state for the shard's third piece, in the order of the layout
"buffer.NAME", "loss_scale.NAME"
"""

import re
from typing import Any

import torch
from torch import Tensor

from parallel.layers import split_dims
from zero.engine import ZeroDataParallel
from zero.optimizer import OwnedWindow, ZeroOptimizer


def owned_state(model: ZeroDataParallel, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """The tensors themselves, no copies: save them before the next step."""
    window_of = {(window.flat, window.index): window for window in optimizer.windows}
    state: dict[str, Tensor] = {}
    for number, flat in enumerate(model.flats):
        for index, owned in enumerate(flat.owned):
            window = window_of.get((flat, index))
            state[f"{number}.{index}.master"] = window.master if window else owned
            if window:
                state |= _optimizer_state(optimizer, window, f"{number}.{index}")
    state |= {f"buffer.{name}": buffer for name, buffer in model.module.named_buffers()}
    state |= {f"loss_scale.{name}": tensor for name, tensor in optimizer.loss_scale.state().items()}
    return state | {"num_skipped": optimizer.num_skipped}


@torch.no_grad()
def load_owned_state(model: ZeroDataParallel, optimizer: ZeroOptimizer, saved: dict[str, Tensor]) -> None:
    """The inverse, into a model and an optimizer of the same layout; every rank's full parameters follow."""
    numbers = {flat: number for number, flat in enumerate(model.flats)}
    windows = {f"{numbers[window.flat]}.{window.index}": window for window in optimizer.windows}
    for name, tensor in saved.items():
        if found := re.fullmatch(r"(\d+\.\d+)\.(\w+)\.(\d+)", name):
            window = windows[found[1]]
            state = optimizer.inner.state[window.pieces[int(found[3])].param]
            is_on_host = tensor.dim() == 0 and not optimizer.inner.defaults.get("fused")  # torch's step counters
            state[found[2]] = tensor.to("cpu" if is_on_host else window.master.device, copy=True)
    for name, tensor in owned_state(model, optimizer).items():
        tensor.copy_(saved[name])
    for flat in model.flats:
        for index, owned in enumerate(flat.owned):
            if owner := windows.get(f"{numbers[flat]}.{index}"):
                owned.copy_(owner.master)
            flat.publish(index).wait()


def group_counters(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """Numbers that a torch optimizer keeps per parameter group beside its settings, such as apex's step counter."""
    return [
        {k: v for k, v in group.items() if k not in optimizer.inner.defaults and isinstance(v, (int, float))}
        for group in optimizer.inner.param_groups
    ]


def describe_layout(model: ZeroDataParallel) -> list[dict[str, Any]]:
    """For each buffer what lies where: enough to find any element of any parameter in the ranks' shards.

    A span is [shape on this rank, start in the buffer, dim that the tensor axis cuts or None].
    """
    cuts = split_dims(model.module)
    return [
        {
            "dtype": str(flat.full.dtype).removeprefix("torch."),
            "windows": [[window.elements.start, window.elements.stop] for window in flat.layout.windows],
            "spans": {s.name: [list(s.shape), s.elements.start, cuts.get(s.name)] for s in flat.layout.spans},
        }
        for flat in model.flats
    ]


def _optimizer_state(optimizer: ZeroOptimizer, window: OwnedWindow, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.{key}.{number}": value
        for number, piece in enumerate(window.pieces)
        for key, value in optimizer.inner.state.get(piece.param, {}).items()
        if isinstance(value, Tensor)
    }
