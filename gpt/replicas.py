"""A check that replicas of the same weights are still equal, which detects silent data corruption."""

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
    """An error raised if replicas differ, most likely because a machine corrupts data silently."""


def check_replicas(state: TrainState, step: int) -> None:
    """Compare checksums of the weights along every axis that replicates them.

    Waits for the device. Raises DivergenceError if they differ.
    """
    model, mesh = state.model, state.mesh
    model.wait_for_updates()
    persistent = [flat.full for flat in model.flats if flat.lifetime is Lifetime.PERSISTENT]
    masters = [bucket.master for bucket in model.buckets]
    for what, axis, tensors in (
        ("parameters", mesh.data, persistent),
        ("master weights", model.replica_axis, masters),
        ("parameters that are not split", mesh.tensor, _not_split(state)),
    ):
        _compare(f"step {step}: the {what}", axis, tensors, state.device)


def _not_split(state: TrainState) -> Iterable[Tensor]:
    """Yield this rank's owned pieces of the parameters that every tensor rank has in full."""
    split = split_dims(state.model.module)
    for flat in state.model.flats:
        for bucket in flat.buckets:
            for span, part in flat.layout.spans_in(bucket.shard):
                if span.name not in split:
                    yield bucket.owned_part(bucket.master, part)


def _compare(what: str, axis: Axis, tensors: Iterable[Tensor], device: torch.device) -> None:
    """Raise DivergenceError if the sum of the tensors' checksums differs along the axis.

    The tensors may be in host memory; the sums are sent from `device`.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    own = torch.stack([zero, *(_checksum(tensor).to(device) for tensor in tensors)]).sum()[None]
    of_ranks = own.new_empty(axis.size)
    axis.all_gather(own, out=of_ranks).wait()
    checksums = of_ranks.tolist()
    majority, _ = Counter(checksums).most_common(1)[0]
    if odd := [rank for rank, checksum in enumerate(checksums) if checksum != majority]:
        raise DivergenceError(
            f"{what} of {axis.name} rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ from those of "
            f"the other {axis.size - len(odd)}, to which they should be equal; the machine may corrupt data silently: "
            "resume from a checkpoint without it"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits, read as integers, as a 0-dim int64 tensor."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
