"""Whether ranks that hold the same bits still do: a machine that computes wrongly is found before it spoils the run."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from gpt.build import TrainState
from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.layers import split_dims
from zero.stage import Lifetime

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class DivergenceError(ConfigError):
    """Replicas differ: most likely a machine computes wrongly."""


def check_replicas(state: TrainState, step: int) -> None:
    """Compare checksums of the weights along every axis that replicates them. Raises DivergenceError.

    Waits for the device.
    """
    model, mesh = state.model, state.mesh
    persistent = [flat.full for flat in model.flats if flat.lifetime is Lifetime.PERSISTENT]
    masters = [master for flat in model.flats for master in flat.masters]
    for what, axis, tensors in (
        ("parameters", mesh.data, persistent),
        ("master weights", model.replica_axis, masters),
        ("parameters that are not cut", mesh.tensor, _not_cut(state)),
    ):
        _compare(f"step {step}: the {what}", axis, tensors, state.device)


def _not_cut(state: TrainState) -> Iterable[Tensor]:
    """What this rank owns of the parameters that all tensor ranks have whole."""
    cut = split_dims(state.model.module)
    for flat in state.model.flats:
        for bucket, master in zip(flat.layout.buckets, flat.masters, strict=True):
            owned = bucket.shard(flat.axis.rank)
            for span, part in flat.layout.pieces(owned):
                if span.name not in cut:
                    yield master[part.start - owned.start : part.stop - owned.start]


def _compare(what: str, axis: Axis, tensors: Iterable[Tensor], device: torch.device) -> None:
    """The tensors may lie in host memory; ranks talk from `device`."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    own = torch.stack([zero, *(_checksum(tensor).to(device) for tensor in tensors)]).sum()[None]
    of_ranks = own.new_empty(axis.size)
    axis.all_gather(own, out=of_ranks).wait()
    found = of_ranks.tolist()
    usual, _ = Counter(found).most_common(1)[0]
    if odd := [rank for rank, checksum in enumerate(found) if checksum != usual]:
        raise DivergenceError(
            f"{what} of {axis.name} rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ from those of "
            f"the other {axis.size - len(odd)}, of which they are replicas: suspect that machine, and go on from a "
            "checkpoint without it"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits, as integers: int64, 0-dim."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
