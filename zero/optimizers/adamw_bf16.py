"""AdamW with moments in bf16, which are rounded up or down at random, so that they are right in the mean.

The random bits of an element are a hash of a seed, of its step, its parameter and its number in the whole parameter: no
shard, bucket or tensor rank changes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zero.optimizers.compressed_adamw import MOMENTS, CompressedAdamW
from zero.step.atoms import ELEMENT
from zero.step.pieces import WholePlace

WORD = 2**32 - 1  # the bits of a hash; it is computed in int64 by products that do not overflow
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


class AdamWBf16(CompressedAdamW):
    """AdamW with moments in bf16 and stochastic rounding, whose bits depend on `seed`."""

    method = "adamw_bf16"
    own_defaults: ClassVar = {"seed": 0}
    own_atom = ELEMENT

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, **settings)
        of_all = (param for group in self.param_groups for param in group["params"])
        self._places = {param: WholePlace(number) for number, param in enumerate(of_all)}

    def locate(self, places: Mapping[nn.Parameter, WholePlace]) -> None:
        """Take the places of pieces of parameters in whole ones."""
        self._places.update(places)

    def new_moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the states of moments of zeros."""
        return {name: torch.zeros_like(param, dtype=torch.bfloat16) for name in MOMENTS}

    def stored(self, state: dict[str, Tensor], elements: slice) -> list[Sequence[Tensor]]:
        """Return a view of each moment."""
        return [(state[name].view(-1)[elements],) for name in MOMENTS]

    def decoded(self, stored: list[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Return copies of the moments."""
        return [values.to(dtype, copy=True) for (values,) in stored]

    def encoded(self, moments: list[Tensor], param: nn.Parameter, elements: slice) -> list[Sequence[Tensor]]:
        """Return the moments, each rounded by one half of the bits of an element."""
        place, step = self._places[param], self.state[param]["step"].to(torch.int64)
        key = mixed(mixed(mixed(self.defaults["seed"] & WORD) + place.param & WORD) + step & WORD)
        bits = mixed((place.numbers(elements, param.device) & WORD) * (0x9E3779B9 - 2**32) + key & WORD)
        return [(rounded(moment, half),) for moment, half in zip(moments, (bits & 0xFFFF, bits >> 16), strict=True)]


def mixed(word: IntOrTensor) -> IntOrTensor:
    """Return a hash of 32 bits of a word of 32 bits, by which each bit of the word changes half of the bits.

    The constants are those of "lowbias32" (C. Wellons).
    """
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & WORD
    word = word ^ (word >> 15)
    word = (word * (0x846CA68B - 2**32)) & WORD
    return word ^ (word >> 16)


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return values in bf16: 16 `bits` are added to those that bf16 drops, and a carry rounds away from zero.

    If the bits are random, the mean of the results is the value.
    """
    words = values.float().view(torch.int32) + bits.to(torch.int32)
    return (words & -0x10000).view(torch.float32).to(torch.bfloat16)
