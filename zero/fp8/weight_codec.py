"""Weights as codes of 8 bits, by parts: what ranks send of weights that products in FP8 read.

    owned weights -> amax of their blocks -> one all-reduce of maxima a step -> scales, the same on all ranks
    values, rounded to bf16 -> codes, a byte each -> codes times scales

[Note: the same bits] The layer quantizes what is in the full buffer, and gets the codes that were sent: the largest
element of a block is the largest code times the scale, which rounds to the same bf16 number, so the scale is the same;
and any other element is its code times the scale, rounded to bf16: off by half a step of bf16 at most, which is too
little to reach another code.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.core.partition.layout import Slice, cut, rectangles
from zero.fp8.scaling import CODES, RECIPES, Blocks, encode, scale_of, scaled_weights

AT_ONCE = 2**24  # elements at a time: temporaries in fp32 have this length


class Rectangle(NamedTuple):
    """A part of a weight: some rows of some columns."""

    row: int
    column: int
    num_rows: int
    num_columns: int


class WeightCodec:
    """The codes of all weights of a model that are sent in FP8, with a scale for each block."""

    name = "FP8"

    def __init__(self, blocks_of: Mapping[nn.Parameter, Blocks], device: torch.device):
        self._sizes_of = {param: blocks.sizes(param.shape) for param, blocks in blocks_of.items()}
        shapes = [
            torch.Size(-(-length // size) for length, size in zip(param.shape, sizes, strict=True))
            for param, sizes in self._sizes_of.items()
        ]
        # In one block no row has a meaning: any range is one rectangle of a matrix of one row.
        self._sizes_of |= {
            param: (1, param.numel()) for param, shape in zip(blocks_of, shapes, strict=True) if shape.numel() == 1
        }
        self._amax = torch.zeros(sum(shape.numel() for shape in shapes), device=device)
        self._scales = self._amax
        stops = list(accumulate(shape.numel() for shape in shapes))
        self._grid_of = {
            param: (range(stop - shape.numel(), stop), shape)
            for param, shape, stop in zip(self._sizes_of, shapes, stops, strict=True)
        }

    def __contains__(self, param: object) -> bool:
        return param in self._sizes_of

    def measure(self, owned: Iterable[tuple[Slice, Tensor]], owners: Axis) -> None:
        """Set the scales to those of the weights of which the ranks of `owners` have these parts; all ranks call it."""
        if not self._sizes_of:
            return
        amax_on = {self._amax.device: self._amax.zero_()}  # and where master weights are, if that is another device
        for where, values in owned:
            if values.device not in amax_on:
                amax_on[values.device] = torch.zeros_like(self._amax, device=values.device)
            for place, (part,) in self._rectangles(where, values):
                amax = self._in_grid(amax_on[values.device], where.param, place)
                found = self._amax_of(part.bfloat16(), place, self._sizes_of[where.param], amax.shape)
                torch.maximum(amax, found.to(amax), out=amax)
        for elsewhere in [amax for amax in amax_on.values() if amax is not self._amax]:
            torch.maximum(self._amax, elsewhere.to(self._amax.device), out=self._amax)
        self._amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum of NaN is not NaN with every backend
        owners.all_reduce(self._amax, out=self._amax, op=dist.ReduceOp.MAX).wait()
        self._scales = scale_of(self._amax)

    def encode(self, where: Slice, values: Tensor, out: Tensor) -> None:
        """Write the codes, bytes, of values of a weight, rounded to bf16."""
        for place, (part, codes) in self._rectangles(where, values, out):
            codes.copy_(encode(part.bfloat16(), self._scales_of(where.param, place)).view(torch.uint8))

    def decode(self, where: Slice, codes: Tensor, out: Tensor) -> None:
        """Write the values that codes stand for."""
        for place, (part, values) in self._rectangles(where, codes, out):
            # Codes are exact in bf16; the product is computed in fp32, and rounded once to the type of `values`.
            torch.mul(part.view(CODES).bfloat16(), self._scales_of(where.param, place), out=values)

    def _scales_of(self, param: nn.Parameter, place: Rectangle) -> Tensor:
        """Return the scale of each element of a part of a weight, or one scale for all of them."""
        scales = self._in_grid(self._scales, param, place)
        if scales.numel() == 1:
            return scales
        of_rows, of_columns = (
            (first % size + torch.arange(number, device=scales.device)) // size
            for first, number, size in zip(place[:2], place[2:], self._sizes_of[param], strict=True)
        )
        return scales[of_rows][:, of_columns]

    @staticmethod
    def _amax_of(part: Tensor, place: Rectangle, sizes: tuple[int, int], grid: torch.Size) -> Tensor:
        """Return the largest magnitudes of a part of a weight in each of the blocks that it touches."""
        if grid.numel() == 1:
            return torch.maximum(part.amax(), -part.amin()).view(1, 1)
        rows, columns = sizes
        whole_blocks = F.pad(part, (place.column % columns, 0, place.row % rows, 0))
        return Blocks(*sizes).split(whole_blocks).abs().amax((1, 3))

    def _rectangles(self, where: Slice, *flats: Tensor) -> Iterator[tuple[Rectangle, list[Tensor]]]:
        """Cut tensors with the elements of a slice into parts of the weight, of at most AT_ONCE or a row."""
        _, grid = self._grid_of[where.param]
        shape = where.span.shape if grid.numel() > 1 else (1, where.param.numel())
        taken = 0
        for (first, column), (num_rows, num_columns) in rectangles(shape, where.in_param):
            rows_at_once = max(1, AT_ONCE // num_columns)
            for row in range(first, first + num_rows, rows_at_once):
                place = Rectangle(row, column, min(rows_at_once, first + num_rows - row), num_columns)
                numel = place.num_rows * num_columns
                yield place, [flat[taken : taken + numel].view(place.num_rows, num_columns) for flat in flats]
                taken += numel

    def _in_grid(self, of_all: Tensor, param: nn.Parameter, place: Rectangle) -> Tensor:
        """Return a view of what a tensor has for the blocks that a part of a weight touches."""
        rows, columns = (
            slice(first // size, (first + number - 1) // size + 1)
            for first, number, size in zip(place[:2], place[2:], self._sizes_of[param], strict=True)
        )
        elements, shape = self._grid_of[param]
        return cut(of_all, elements).view(shape)[rows, columns]


def weight_codec(module: nn.Module, device: torch.device) -> WeightCodec:
    """Return the codec of the weights that products in FP8 read. Raises ConfigError if the module has none."""
    found = {param: RECIPES[recipe] for _, param, recipe in scaled_weights(module)}
    if coded := {param: row.weight for param, row in found.items() if row.same_transposed}:
        return WeightCodec(coded, device)
    read = "multiplies by recipes that quantize a weight and its transpose apart" if found else "reads no weight in FP8"
    raise ConfigError(
        f"ZeroConfig.gather_dtype=fp8: the module {read}; call zero.fp8.convert with tensorwise or blockwise before it "
        "is wrapped, or choose gather_dtype=null"
    )
