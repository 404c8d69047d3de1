"""Matrices of a few bits an element, with a scale for each block of them.

    value      amax of its block / largest code = scale      value / scale -> rounded to a code of 8 bits
    recipe       operands of a product (rows, K)      weights, where they are multiplied by activations or gradients
    tensorwise   one block                            one block
    rowwise      a block for each row                 a block for each row
    blockwise    1 x 128                              128 x 128
    mxfp8        1 x 32, scales are powers of two     1 x 32
    nvfp4        1 x 16, scales are in E4M3           1 x 16

A block with an element that is not finite has the scale NaN, so that all products with it are NaN: casts to E4M3
saturate in silence, and the loss would not show it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CODES = torch.float8_e4m3fn
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
ENCODED_AT_ONCE = 2**24  # elements at a time: their ratios to the scales are in fp32
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
RecipeName = Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


class Blocks(NamedTuple):
    """The shape of the blocks of a matrix that have a scale each; None: as long as the matrix."""

    rows: int | None = None
    columns: int | None = None

    def sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a block of a matrix of this shape."""
        return self.rows or max(shape[0], 1), self.columns or max(shape[1], 1)

    def split(self, matrix: Tensor) -> Tensor:
        """Return the matrix as (blocks, rows, blocks, columns), with zeros beyond its ends."""
        rows, columns = self.sizes(matrix.shape)
        missing = -matrix.shape[0] % rows, -matrix.shape[1] % columns
        if any(missing):
            matrix = F.pad(matrix, (0, missing[1], 0, missing[0]))
        return matrix.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _exact(scales: Tensor, _tensor_amax: Tensor, _largest: float) -> Tensor:
    return scales


def _power_of_two(scales: Tensor, _tensor_amax: Tensor, largest: float) -> Tensor:
    """Round as OCP's MX formats: the exponent of the largest element less that of the largest code."""
    exponents = (scales * largest).frexp().exponent - math.frexp(largest)[1]  # no device rounds these, as log2 does
    return torch.where(scales.isfinite(), exponents.clamp(-127, 127).to(scales.dtype).exp2(), scales)


def _in_e4m3(scales: Tensor, tensor_amax: Tensor, largest: float) -> Tensor:
    """Round to E4M3, relative to a scale of the whole tensor with which the largest one is E4M3's largest value."""
    of_tensor = scale_of(tensor_amax, largest * LARGEST["e4m3"])
    rounded = (scales / of_tensor).clamp(max=LARGEST["e4m3"]).to(CODES).to(scales.dtype) * of_tensor
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


@dataclass(frozen=True)
class Recipe:
    """The blocks of the operands of a product, and the format of codes and scales."""

    operand: Blocks
    weight: Blocks
    """Of weights in the output and in the gradient of the input; in that of weights, both operands have `operand`."""
    code: Literal["e4m3", "e2m1"] = "e4m3"
    round_scales: Callable[[Tensor, Tensor, float], Tensor] = _exact
    same_transposed: bool = False
    """True if a weight and its transpose have the same codes, so that one set of them is enough (`gather_dtype`)."""


RECIPES: dict[RecipeName, Recipe] = {
    "tensorwise": Recipe(Blocks(), Blocks(), same_transposed=True),
    "rowwise": Recipe(Blocks(1), Blocks(1)),
    "blockwise": Recipe(Blocks(1, 128), Blocks(128, 128), same_transposed=True),
    "mxfp8": Recipe(Blocks(1, 32), Blocks(1, 32), round_scales=_power_of_two),
    "nvfp4": Recipe(Blocks(1, 16), Blocks(1, 16), "e2m1", _in_e4m3),
}


class Scaled(NamedTuple):
    """A matrix (rows, columns) as codes, each of which stands for itself times the scale of its block."""

    codes: Tensor
    """(rows, columns) of float8_e4m3fn, which has the values of E2M1 too."""
    scales: Tensor
    """(blocks, blocks), in at least fp32."""
    blocks: Blocks

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (rows, columns) in `dtype`."""
        rows, columns = self.codes.shape
        parts = self.blocks.split(self.codes.to(dtype)) * self.scales[:, None, :, None].to(dtype)
        return parts.flatten(2).flatten(0, 1)[:rows, :columns]


def scale_of(amax: Tensor, largest: float = LARGEST["e4m3"]) -> Tensor:
    """Return the scales with which largest magnitudes become the largest code; NaN if a magnitude is not finite.

    They are normal numbers: a kernel may take a subnormal one for zero, and its reciprocal overflows. Values below the
    smallest normal number times `largest` get smaller codes instead.
    """
    codes = torch.full_like(amax, largest)
    # The divisor is a tensor, and no constant: instead of dividing by a number, CUDA and inductor multiply by its
    # reciprocal, which rounds twice.
    divisors = torch.where(amax.isfinite(), codes, torch.full_like(amax, math.nan))
    return (torch.where(amax == 0, codes, amax) / divisors).clamp(min=SMALLEST_NORMAL)


def quantize(matrix: Tensor, recipe: Recipe, *, is_weight: bool = False) -> Scaled:
    """Return a matrix (rows, K), which is multiplied along K, in the codes of a recipe; contiguous, also if it is not.

    Weights are rounded to bf16 first, as those are that are sent in the type of the parameters.
    """
    blocks = recipe.weight if is_weight else recipe.operand
    if is_weight:
        matrix = matrix.bfloat16()
    wide = torch.promote_types(matrix.dtype, torch.float32)
    parts, largest = blocks.split(matrix), LARGEST[recipe.code]
    amax = torch.maximum(parts.amax((1, 3)), -parts.amin((1, 3))).to(wide)  # `abs` would copy the matrix
    scales = recipe.round_scales(scale_of(amax, largest), amax.amax(), largest)
    codes = _encoded(parts, scales[:, None, :, None], recipe.code).flatten(2).flatten(0, 1)
    return Scaled(codes[: matrix.shape[0], : matrix.shape[1]].contiguous(), scales, blocks)


def _encoded(parts: Tensor, scales: Tensor, code: str) -> Tensor:
    """Return the codes of (blocks, rows, blocks, columns), some at a time unless this is compiled."""
    if torch.compiler.is_compiling():
        return encode(parts, scales, code)
    dim = int(parts.shape[0] == 1)
    at_once = max(1, ENCODED_AT_ONCE * parts.shape[dim] // max(1, parts.numel()))
    of_parts = scales.expand(parts.shape).split(at_once, dim)
    encoded = [encode(*pair, code) for pair in zip(parts.split(at_once, dim), of_parts, strict=True)]
    return encoded[0] if len(encoded) == 1 else torch.cat(encoded, dim)


def encode(values: Tensor, scales: Tensor, code: str = "e4m3") -> Tensor:
    """Return values / scales, rounded to the nearest code."""
    ratios = (values / scales).clamp_(-LARGEST[code], LARGEST[code])
    return (ratios if code == "e4m3" else _round_to_e2m1(ratios)).to(CODES)


def _round_to_e2m1(values: Tensor) -> Tensor:
    """Round magnitudes up to 6 to 0, 0.5, 1, 1.5, 2, 3, 4 or 6: a step of half the power of two below, at least 0.5."""
    steps = values.abs().clamp(min=1).log2().floor().exp2() / 2
    return (values / steps).round() * steps


def scaled_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, RecipeName]]:
    """Iterate over the weights (out, in) that are read by products in FP8 only, with their recipe, by name."""
    readers: dict[nn.Parameter, set[Any]] = {}
    found: dict[nn.Parameter, str] = {}
    for prefix, layer in module.named_modules():
        products = getattr(layer, "products", None)
        for name, param in layer.named_parameters(recurse=False):
            # Of a weight that tensor ranks share, each multiplies by some rows, which have scales of their own.
            is_whole = name not in getattr(layer, "shared_dims", ())
            is_scaled = hasattr(products, "recipe") and param.dim() == 2 and is_whole
            readers.setdefault(param, set()).add(products if is_scaled else None)
            found.setdefault(param, f"{prefix}.{name}".lstrip("."))
    for param, name in found.items():
        (reader, *others) = readers[param]
        if not others and reader is not None:
            yield name, param, reader.recipe
