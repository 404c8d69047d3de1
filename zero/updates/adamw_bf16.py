"""AdamW with moments in bf16, which are rounded up or down at random, so that they are right in the mean.

The random bits of an element are a hash of a seed, of its step, its parameter and its number in the whole parameter: no
shard, bucket or tensor rank changes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zero.core.step.pieces import WholePlace
from zero.updates.compressed_adamw import MOMENTS, CompressedAdamW

GOLDEN = 0x9E3779B9 - 2**32  # it spreads the numbers of elements over the words of int32


class AdamWBf16(CompressedAdamW):
    """AdamW with moments in bf16 and stochastic rounding, whose bits depend on `seed`."""

    own_defaults: ClassVar = CompressedAdamW.own_defaults | {"seed": 0}
    common: ClassVar = frozenset({"seed"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters have the next numbers; the constructor calls this for the first groups."""
        super().add_param_group(param_group)
        self._places: dict[nn.Parameter, WholePlace] = self.__dict__.get("_places", {})
        added = enumerate(self.param_groups[-1]["params"], len(self._places))
        self.locate({param: WholePlace(number) for number, param in added})

    def locate(self, places: Mapping[nn.Parameter, WholePlace]) -> None:
        """Take the places of pieces of parameters in whole ones."""
        self._places.update(places)

    def new_moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the states of moments of zeros."""
        return {name: torch.zeros_like(param, dtype=torch.bfloat16) for name in MOMENTS}

    def stored(self, state: dict[str, Tensor], elements: slice) -> list[Sequence[Tensor]]:
        """Return a view of each moment."""
        return [(state[name].view(-1)[elements],) for name in MOMENTS]

    def context(self, param: nn.Parameter, elements: slice) -> tuple[Any, ...]:
        """Return the place of the elements and the seed; on a GPU the place has tensors, which compiled code reads."""
        place = self._places[param]
        if param.is_cuda and not isinstance(place.start, Tensor):  # once, without a copy, for which the host would wait
            number = torch.full((), int(place.param), dtype=torch.int32, device=param.device)
            place = replace(place, param=number, start=torch.full((), place.start, device=param.device))
            self._places[param] = place
        return replace(place, start=place.start + elements.start), self.defaults["seed"]

    @staticmethod
    def decoded(stored: list[Sequence[Tensor]], context: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of the moments."""
        return [values.to(dtype, copy=True) for (values,) in stored]

    @staticmethod
    def encoded(moments: list[Tensor], context: tuple[Any, ...], step: Tensor) -> list[Sequence[Tensor]]:
        """Return the moments, each rounded by one half of the bits of an element."""
        place, seed = context
        key = mix_(mix_(step.to(torch.int32) + seed) + place.param)
        bits = mix_(place.numbers(len(moments[0]), step.device).mul_(GOLDEN).add_(key))
        return [(rounded(moment, half),) for moment, half in zip(moments, (bits, bits >> 16), strict=True)]


def mix_(words: Tensor) -> Tensor:
    """Overwrite words of 32 bits by a hash, of which each bit of a word changes half of the bits.

    The constants are those of "lowbias32" (C. Wellons). Products keep their lower 32 bits.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 16).bitwise_and_(2**16 - 1))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return values in bf16: the lower 16 of `bits` are added to what bf16 drops, and a carry rounds away from zero.

    If the bits are random, the mean of the results is the value.
    """
    words = (bits & 0xFFFF).add_(values.float().view(torch.int32)).bitwise_and_(-0x10000)
    return torch.where(values.isnan(), values, words.view(torch.float32)).to(torch.bfloat16)
