"""The pieces of parameters that this rank owns: the parameters of its torch optimizer."""

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.buckets.bucket import Bucket
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.layout import Slice, shifted
from zero.core.step.parameter_groups import Groups


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements of one parameter that a rank owns of one bucket, flattened: the torch optimizer's own parameter."""

    param: nn.Parameter
    """The optimizer's parameter, a view of the bucket's master weights."""
    elements: range
    """The elements of the piece, counted from the beginning of the owned range of the bucket."""
    group: int
    """The number of the parameter group."""
    name: str
    """The name of the model's parameter."""
    in_param: range
    """The elements of the piece, counted in the model's parameter."""


@dataclass(frozen=True)
class WholePlace:
    """The place of a piece in the whole parameter, over all tensor ranks: an element has one number in all layouts."""

    param: int | Tensor
    """The number of the parameter, in the order of the groups."""
    start: int | Tensor = 0
    """The first element, counted in the parameter of this tensor rank, or in the whole one if `num_parts` is 1."""
    run: int = 1
    """The number of elements of this tensor rank between those of others."""
    part: int = 0
    """The number of this tensor rank's part."""
    num_parts: int = 1
    """The number of tensor ranks that divide the parameter."""

    def numbers(self, count: int, device: torch.device) -> Tensor:
        """Return the numbers of the first elements in the whole parameter, of which int32 has the last bits."""
        if self.num_parts == 1:
            return torch.arange(count, dtype=torch.int32, device=device).add_((self.start + 2**31) % 2**32 - 2**31)
        own = torch.arange(count, device=device).add_(self.start)
        return (own + (own // self.run * (self.num_parts - 1) + self.part) * self.run).to(torch.int32)


class OwnedState(Mapping[str, Any]):
    """The part of a parameter's optimizer state that this rank owns, to be read; {} before the first step.

    A tensor of a parameter in several buckets is a copy, of one part after the other.
    """

    def __init__(self, pieces: Sequence[Piece], inner: Optimizer):
        self._pieces, self._inner = pieces, inner

    def __getitem__(self, name: str) -> Any:
        if not self._pieces:
            raise KeyError(name)
        first, *others = (self._inner.state.get(piece.param, {})[name] for piece in self._pieces)
        is_divided = others and isinstance(first, Tensor) and first.dim() > 0
        return torch.cat([first, *others]) if is_divided else first

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner.state.get(self._pieces[0].param, ()) if self._pieces else ())

    def __len__(self) -> int:
        return len(list(iter(self)))


class OwnedPieces:
    """The trainable parameters of an optimizer, and the pieces of them that this rank owns, by bucket.

    `owned` are all parts of parameters in the shards of these buckets, also of parameters in no group.
    """

    def __init__(self, flats: Sequence[FlatParameters], groups: Groups, known: set[nn.Parameter]):
        """`flats`: the trainable ones; `known`: all parameters of the model.

        Raises ValueError if a group has something else, or no parameter is trainable.
        """
        numbers = self._numbers = _number_groups(groups, known)
        trainable = {param for flat in flats for param in flat.params}
        self.group_of = {param: number for param, number in numbers.items() if param in trainable}
        if not self.group_of:
            raise ValueError(
                f"none of the {len(numbers)} parameters of the optimizer is trainable; set `requires_grad` before the "
                "model is wrapped"
            )
        self.flats, self.params = flats, frozenset(self.group_of)
        self.owned: dict[Bucket, Sequence[Slice]] = {}
        self.by_bucket: dict[Bucket, list[Piece]] = {}
        self.by_param: dict[nn.Parameter, list[Piece]] = {param: [] for param in self.group_of}
        for flat in flats:
            for bucket in flat.buckets:
                if not self.params.isdisjoint(bucket.grads.parts):
                    bucket.place_master(bucket.home)
                    self.owned[bucket] = bucket.slices
                    self.by_bucket[bucket] = self._pieces(bucket)
        self._shared = {bucket for bucket in self.owned if not self.params.issuperset(bucket.grads.parts)}

    def groups(self, groups: Groups) -> Groups:
        """Return parameter groups with pieces in place of parameters."""
        pieces = [piece for of_bucket in self.by_bucket.values() for piece in of_bucket]
        return [group | {"params": [p.param for p in pieces if p.group == n]} for n, group in enumerate(groups)]

    def locate(self, inner: Optimizer, split: Mapping[str, int], tensor: Axis) -> None:
        """Give an optimizer the places of its pieces; `split` has the dim that tensor ranks divide, by name."""
        found = {}
        for number, param in enumerate(self._numbers):
            for piece in self.by_param.get(param, ()):
                dim, start = split.get(piece.name), piece.in_param.start
                if dim:
                    place = WholePlace(number, start, param.shape[dim:].numel(), tensor.rank, tensor.size)
                else:  # each tensor rank has all of it, or consecutive elements
                    place = WholePlace(number, start + (dim == 0) * tensor.rank * param.numel())
                found[piece.param] = place
        locate(inner, found)

    def own_grads(self, bucket: Bucket) -> list[Tensor]:
        """Return views of the owned gradients of these parameters, without the gradients of other optimizers."""
        grad = bucket.grads.own
        if bucket not in self._shared:
            return [grad]
        return [grad[piece.elements.start : piece.elements.stop] for piece in self.by_bucket[bucket]]

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        found = []
        for own in bucket.slices:
            if own.param in self.group_of:
                view, group = nn.Parameter(bucket.owned_part(bucket.master, own.elements)), self.group_of[own.param]
                in_own = shifted(own.elements, bucket.ranges.own.start)
                found.append(Piece(view, in_own, group, own.span.name, own.in_param))
                self.by_param[own.param].append(found[-1])
        return found


class UnusedParameters:
    """A filter of what is updated: if it `skips`, without what no rank used, else all, with a warning once."""

    def __init__(self, pieces: OwnedPieces, module: nn.Module, *, skips: bool, assembles: bool):
        """Raise ConfigError if it `skips`, and an update `assembles` pieces."""
        if skips and assembles:
            raise ConfigError("skip_unused=True of ZeroOptimizer cannot leave out parts of matrices; choose False")
        self._owned, self._skips = pieces, skips
        self._names = {param: name for name, param in module.named_parameters() if param in pieces.params}
        self._warns, self.pieces = not skips, frozenset[Piece]()  # those that are not updated

    def find(self, used: Set[nn.Parameter], axes: Sequence[Axis], device: torch.device) -> None:
        """Find what was not used, given the parameters of which this rank has got a gradient in this step.

        If it `skips`, all ranks along `axes` call it, and the host waits for the answers of the others.
        """
        if self._warns and not used >= self._owned.params:
            self._warns = False
            unused = [name for param, name in self._names.items() if param not in used]
            warnings.warn(
                f"{len(unused)} of {len(self._names)} parameters, such as {unused[0]}, got no gradient on this rank, "
                "where it counts as zero: weight decay and momentum change those that no rank has used; choose "
                "ZeroOptimizer(skip_unused=True) not to update them",
                stacklevel=5,  # the caller of `ZeroOptimizer.step`
            )
        if self._skips:
            num_users = torch.tensor([param in used for param in self._names], dtype=torch.int32, device=device)
            for axis in axes:
                axis.all_reduce(num_users, out=num_users).wait()
            unused_params = (param for param, num in zip(self._names, num_users.tolist(), strict=True) if not num)
            self.pieces = frozenset(piece for param in unused_params for piece in self._owned.by_param[param])


def locate(inner: Any, places: Mapping[nn.Parameter, WholePlace]) -> None:
    """Give an optimizer the places of its pieces, if it asks for them by a method of this name."""
    if callable(method := getattr(inner, "locate", None)):
        method(places)


def _number_groups(groups: Groups, known: set[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Return the number of the group of each parameter; raise ValueError if it is not one of `known`."""
    group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
    for param, number in group_of.items():
        if param not in known:
            raise ValueError(
                f"parameter group {number} has a tensor of shape {tuple(param.shape)} not of this model; give "
                "parameters of the module inside ZeroDataParallel"
            )
    return group_of
