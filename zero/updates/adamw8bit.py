"""AdamW with moments of 8 bits: block-wise dynamic quantization (Dettmers et al., 2022).

A block of 256 elements has one scale, the largest of its magnitudes, and for each element the number of a value between
-1 and 1 in a table. Blocks are counted from the beginning of the parameter, and shards do not cut them. So the results
do not depend on the sharding.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero.updates.compressed_adamw import MOMENTS, CompressedAdamW

BLOCK = 256
SCALE = f"scale_per_{BLOCK}"  # the end of the name of a state that has one value for so many elements
LOWEST_POWER = -6  # of 10, of the smallest values of the table
SIGNED = dict(zip(MOMENTS, (True, False), strict=True))  # name of a moment: has a sign


class AdamW8bit(CompressedAdamW):
    """AdamW whose moments have 8 bits."""

    granularity = BLOCK

    def new_moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the numbers and the scales of moments of zeros."""
        found = {}
        for name, is_signed in SIGNED.items():
            zero = table_of(is_signed).index(0.0)
            found[name] = torch.full((param.numel(),), zero, dtype=torch.uint8, device=param.device)
            found[f"{name}_{SCALE}"] = torch.zeros(-(-param.numel() // BLOCK), dtype=torch.float32, device=param.device)
        return found

    def stored(self, state: dict[str, Tensor], elements: slice) -> list[Sequence[Tensor]]:
        """Return views of the numbers and the scales of some elements, which begin with a block."""
        blocks = slice(elements.start // BLOCK, -(-elements.stop // BLOCK))
        return [(state[name][elements], state[f"{name}_{SCALE}"][blocks]) for name in SIGNED]

    def context(self, param: nn.Parameter, elements: slice) -> tuple[Any, ...]:
        """Return the table and the bounds of each moment."""
        return tuple(self.table(is_signed, param.device) for is_signed in SIGNED.values())

    @staticmethod
    def decoded(stored: list[Sequence[Tensor]], context: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return the values of numbers and scales."""
        both = zip(stored, context, strict=True)
        return [dequantized(numbers, scales, table).to(dtype) for (numbers, scales), (table, _) in both]

    @staticmethod
    def encoded(moments: list[Tensor], context: tuple[Any, ...], step: Tensor) -> list[Sequence[Tensor]]:
        """Return numbers and scales."""
        return [quantized(values, bounds) for values, (_, bounds) in zip(moments, context, strict=True)]

    def requantize(self, param: nn.Parameter, scales: dict[str, Tensor]) -> None:
        """Quantize moments again that were quantized in other blocks; `scales` has the scale of each element.

        Each value then has an error of at most half the distance of two values of the table: 1/140 of the largest
        magnitude in its new block for the first moment, 1/280 for the second.
        """
        state = self.state[param]
        for name, is_signed in SIGNED.items():
            table, bounds = self.table(is_signed, param.device)
            values = table[state[name].int()] * scales[f"{name}_{SCALE}"]
            state[name], state[f"{name}_{SCALE}"] = quantized(values, bounds)

    def table(self, is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table and its bounds on a device; kept, because a copy to an accelerator would block the host."""
        tables: dict[Any, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_tables", {})
        if (is_signed, device) not in tables:
            table = torch.tensor(table_of(is_signed), dtype=torch.float32, device=device)
            tables[is_signed, device] = table, bounds_of(table, is_signed)
        return tables[is_signed, device]


def bounds_of(table: Tensor, is_signed: bool) -> Tensor:
    """Return the bounds between the values of a table: a value is stored as the nearest one.

    Only 0 is stored as 0 without a sign. A small second moment that became 0 would divide the first one by eps: single
    updates of rare words would have hundreds of times the learning rate.
    """
    bounds = (table[1:] + table[:-1]) / 2
    if not is_signed:
        bounds[0] = 0.0
    return bounds


def quantized(values: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers (uint8) of flat values in a table, and the scale (fp32) of each block of them."""
    blocks = _in_blocks(values.float())
    scales = blocks.abs().amax(dim=1)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    numbers = torch.bucketize(relative, bounds)
    return numbers.flatten()[: values.numel()].to(torch.uint8), scales


def dequantized(numbers: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the flat values for the results of `quantized`, in fp32."""
    blocks = _in_blocks(table[numbers.int()]) * scales[:, None]
    return blocks.flatten()[: numbers.numel()]


def _in_blocks(values: Tensor) -> Tensor:
    """Return flat values as (blocks, elements of a block), with zeros after the last one."""
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


@cache
def table_of(is_signed: bool) -> list[float]:
    """Return the 256 values of the table, in ascending order.

    In each power of ten from 1e-6 on the values are the centers of equal intervals, twice as many as in the one before.
    There are also 0 and 1.
    """
    found = [0.0, 1.0]
    for number in range(-LOWEST_POWER + 1):
        num_intervals = 2 ** (number + (not is_signed))
        centers = [0.1 + 0.9 * (index + 0.5) / num_intervals for index in range(num_intervals)]
        centers = [center * 10.0 ** (number + LOWEST_POWER) for center in centers]
        found += centers + ([-center for center in centers] if is_signed else [])
    return sorted(found)
