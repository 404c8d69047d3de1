"""A check that replicas of the same model states are still equal, which detects silent data corruption."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gpt.builder.train_state import TrainState
from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from zero.buckets.hashes import bit_sum
from zero.partition.stage import Lifetime

MOST_NAMES = 3  # in an error

NamedTensors = Iterable[tuple[str, Tensor]]


class DivergenceError(ConfigError):
    """An error raised if replicas differ, most likely because a machine corrupts data silently."""


def compare_replicas(state: TrainState, step: int) -> None:
    """Compare checksums of the weights and of the optimizer states along every axis that replicates them.

    Waits for the device. Raises DivergenceError if they differ, with the ranks and the parameters.
    """
    model, mesh = state.model, state.mesh
    model.wait_for_updates()
    split = split_dims(model.module)
    not_split = ((name, tensor) for name, tensor in _owned(state) if name not in split)
    for what, axis, tensors in (
        ("parameters", mesh.data, _persistent(state)),
        ("master weights", model.replica_axis, _owned(state)),
        ("optimizer states", model.replica_axis, optimizer_states(state)),
        ("parameters that are not split", mesh.tensor, not_split),
    ):
        _compare(f"step {step}: the {what}", axis, tensors, state.device)


def _persistent(state: TrainState) -> NamedTensors:
    """Yield the full parameters that every data-parallel rank keeps."""
    for flat in state.model.flats:
        if flat.lifetime is Lifetime.PERSISTENT:
            for span in flat.layout.spans:
                yield span.name, flat.as_sent(span.elements)


def _owned(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's owned pieces of the master weights."""
    for flat in state.model.flats:
        for bucket in flat.buckets:
            for span, part in flat.layout.spans_in(bucket.shard):
                yield span.name, bucket.owned_part(bucket.master, part)


def optimizer_states(state: TrainState) -> NamedTensors:
    """Yield the optimizer states of this rank's owned pieces, such as both moments of Adam."""
    trainable = set(state.optimizer.buckets)
    for flat in state.model.flats:
        for bucket in trainable.intersection(flat.buckets):
            names = {part.start - bucket.shard.start: span.name for span, part in flat.layout.spans_in(bucket.shard)}
            for piece in state.optimizer.pieces_of(bucket):
                for kind, value in state.optimizer.inner.state.get(piece.param, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{kind} of {names[piece.elements.start]}", value


def _compare(what: str, axis: Axis, tensors: NamedTensors, device: torch.device) -> None:
    """Raise DivergenceError if the checksums of the tensors differ along the axis.

    The tensors may be in host memory; the sums are sent from `device`. Their names, and how many there are of each, are
    the same on all ranks of the axis. One number is compared; only if it differs, those of all names are.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sums: defaultdict[str, Tensor] = defaultdict(lambda: zero)
    if axis.size > 1:
        for name, tensor in tensors:
            sums[name] = sums[name] + bit_sum(tensor).to(device)
    own = torch.stack([zero, *(sums[name] for name in sorted(sums))])
    (of_all,) = gathered(own.sum()[None], axis)
    if len(set(of_all)) > 1:
        _, *of_names = gathered(own, axis)
        differing = [name for name, of_ranks in zip(sorted(sums), of_names, strict=True) if len(set(of_ranks)) > 1]
        raise DivergenceError(_message(what, axis, of_all, differing))


def gathered(own: Tensor, axis: Axis) -> list[list[int]]:
    """Return, for each element of a 1-dim tensor, those of all ranks of the axis. Waits for the device."""
    of_ranks = own.new_empty(axis.size * len(own))
    axis.all_gather(own, out=of_ranks).wait()
    return of_ranks.view(axis.size, len(own)).t().tolist()


def _message(what: str, axis: Axis, checksums: list[int], names: list[str]) -> str:
    """Return the error for replicas with these checksums, which differ in the tensors of these names."""
    usual, number = Counter(checksums).most_common(1)[0]
    odd = [rank for rank, checksum in enumerate(checksums) if checksum != usual]
    listed = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
    if number > len(odd):
        ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ in {listed} from those of the "
        others = f"other {number}, to which they should be equal"
    else:  # such as one of two: none of them is known to be right
        ranks = f"ranks {', '.join(map(str, range(axis.size)))} differ in {listed}, and should be equal; "
        others = "no majority shows which is right"
    remedy = "the machine may corrupt data silently: resume from a checkpoint without it"
    return f"{what} of {axis.name} {ranks}{others}; {remedy}"
