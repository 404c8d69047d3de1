"""Conversion of parameters between this project and transformers, one at a time, in both directions.

           transformers                              here
linear     GPT-2: weight (in, out); else (out, in)   weight (out, in)
heads      q, k and v, or columns (q | k | v, ...)   rows (head, q | k | v, head_dim); grouped: q, and rows
                                                     (head, k | v, head_dim)
SwiGLU     gate and up                               rows (unit, gate | up)
head       lm_head.weight                            no entry if it is tied
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.families.family import Family
from gpt.model.transformer import GPT
from gpt.shape.config import ModelConfig
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError

WORDS = ("token_embedding.weight", "head.weight")  # the parameters whose rows are words, and are padded
HEAD = "lm_head."
Rectangle = tuple[torch.Size, Tensor]  # the offsets of a part of a tensor, and its values


class Source(NamedTuple):
    """The tensors of transformers that a parameter is made of, by their names without the family's prefix."""

    names: tuple[str, ...]
    num_groups: int = 1
    pieces: int = 1
    is_transposed: bool = False

    @property
    def num_parts(self) -> int:
        """The number of parts that are packed."""
        return len(self.names) * self.pieces

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each tensor, if the parameter has the shape `ours`."""
        shape = ours[0] // len(self.names), *ours[1:]
        return shape[::-1] if self.is_transposed else shape

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the parameter, contiguous, made of the tensors."""
        tensors = [tensor.T if self.is_transposed else tensor for tensor in tensors]
        parts = [piece for tensor in tensors for piece in tensor.chunk(self.pieces)]
        grouped = [part.unflatten(0, (self.num_groups, -1)) for part in parts]
        return torch.stack(grouped, dim=1).flatten(0, 2)

    def unpack(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors, contiguous, that a parameter is made of."""
        parts = tensor.unflatten(0, (self.num_groups, self.num_parts, -1)).transpose(0, 1).flatten(0, 2)
        return [(part.T if self.is_transposed else part).contiguous() for part in parts.chunk(len(self.names))]

    def cut(self, rectangles: Iterable[Rectangle], num_rows: int) -> list[list[Rectangle]]:
        """Return the rectangles of each tensor, views, that those of the parameter consist of; it has `num_rows`."""
        found: list[list[Rectangle]] = [[] for _ in self.names]
        part_rows = num_rows // (self.num_groups * self.num_parts)
        for (first, *others), values in rectangles:
            for rows in self._runs(range(first, min(first + len(values), num_rows)), part_rows):
                packed, row = divmod(rows.start, part_rows)
                group, part = divmod(packed, self.num_parts)
                number, piece = divmod(part, self.pieces)
                offsets = [(piece * self.num_groups + group) * part_rows + row, *others]
                own = values[rows.start - first : rows.stop - first : rows.step]
                if self.is_transposed:
                    offsets, own = offsets[::-1], own.T
                found[number].append((torch.Size(offsets), own))
        return found

    def _runs(self, rows: range, part_rows: int) -> Iterator[range]:
        """Divide rows of the parameter into those that are consecutive rows of a tensor."""
        if part_rows == 1 or self.num_parts == 1:  # such as the units of SwiGLU
            yield from filter(None, (rows[number :: self.num_parts] for number in range(self.num_parts)))
        elif rows:
            cuts = range((rows.start // part_rows + 1) * part_rows, rows.stop, part_rows)
            yield from (range(*ends) for ends in pairwise([rows.start, *cuts, rows.stop]))


def source_of(name: str, family: Family, config: ModelConfig) -> Source:
    """Return what the parameter `name` is made of."""
    path, within = "", name
    if name.startswith("blocks."):
        _, number, within = name.split(".", 2)
        path = f"{family.modules['blocks']}.{number}."
    module, part = within[: within.rindex(".")], within[within.rindex(".") + 1 :]
    kind = part.rpartition("_")[2]  # q_weight is the weight of q
    is_transposed = family.is_transposed and kind == "weight" and module.startswith(("attention.", "mlp."))
    if packed := family.packed.get(within.removesuffix(kind)):
        names = tuple(f"{path}{theirs}.{kind}" for theirs in packed.names)
        return Source(names, getattr(config, packed.groups), packed.pieces, is_transposed)
    return Source((f"{path}{family.modules[module]}.{part}",), is_transposed=is_transposed)


def with_prefix(name: str, family: Family) -> str:
    """Return the whole name of a tensor in a model with a head."""
    return name if name.startswith(HEAD) else f"{family.prefix}{name}"


def has_logit_scale(name: str, config: ModelConfig) -> bool:
    """Return whether a parameter is that of the last norm, before logits that muP scales."""
    return config.width_multiplier != 1 and name.startswith("final_norm.")


def to_transformers(name: str, tensor: Tensor, family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of transformers, by name, that a parameter consists of, without rows of padding.

    The last norm has muP's factor of logits, which transformers' models do not have.
    """
    source = source_of(name, family, config)
    if has_logit_scale(name, config):
        tensor = tensor / config.width_multiplier
    tensors = source.unpack(tensor[: config.vocab_size] if name in WORDS else tensor)
    return {with_prefix(theirs, family): part for theirs, part in zip(source.names, tensors, strict=True)}


def load_weights(model: GPT, weights: Mapping[str, Tensor]) -> None:
    """Copy whole parameters of transformers into a model of any tensor size; set the vocabulary's padding to zero.

    `weights` holds them by this project's names, and is read one parameter at a time: it may read each from disk.
    Raises ConfigError if a value is not finite in the data type of the model.
    """
    axis, dims = model.tokens.axis, split_dims(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = weights[name].to(param.dtype)
            axis.log.note_progress()
            if has_logit_scale(name, model.config):
                whole = whole * model.config.width_multiplier
            if not whole.isfinite().all():
                raise ConfigError(
                    f"{name} has {int((~whole.isfinite()).sum())} values that are not finite in {param.dtype}, 0 are "
                    "allowed; choose other weights or another precision"
                )
            if name in WORDS:
                whole = F.pad(whole, (0, 0, 0, model.config.padded_vocab_size - whole.shape[0]))
            param.copy_(whole.chunk(axis.size, dims[name])[axis.rank] if name in dims else whole)
