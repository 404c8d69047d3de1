"""The table that says which kernel multiplies scaled matrices on which device, or why none does.

A run, a dry run and the planner ask it before anything is launched. Torch's kernels for fake tensors are not asked:
they accept what CUDA refuses. The rows follow torch's CUDA sources (`_scaled_mm_v2`); no GPU has run them yet.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, scaled_mm
from torch.utils.flop_counter import register_flop_formula

from zero.fp8.scaling import CODES, Blocks, RecipeName, Scaled

MULTIPLE = 16  # elements: K and N of a product in 8 bits are multiples, as cuBLASLt wants; M is padded
BLOCK_WISE_CUBLASLT = 120900
BLOCKS_OF_COLUMNS = 4  # the scales of 128 x 128 blocks are padded to as many along K


class Device(NamedTuple):
    """The facts that decide which kernels a device has."""

    kind: str  # "cpu" or "cuda"
    capability: tuple[int, int] = (0, 0)  # of compute, such as (9, 0)
    cublaslt: int = 0  # version, such as 120900

    @classmethod
    @cache
    def of(cls, device: torch.device) -> "Device":
        """Return the facts of a device of this machine."""
        if device.type != "cuda":
            return cls(device.type)
        version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        return cls("cuda", torch.cuda.get_device_capability(device), 10000 * version[0] + 100 * version[1])


HOPPER = Device("cuda", (9, 0), 130000)  # what a dry run imitates


class Kernel(NamedTuple):
    """A row of the table: the devices on which torch has a kernel for a recipe."""

    least_capability: tuple[int, int]
    most_capability: tuple[int, int] = (99, 0)
    least_cublaslt: int = 0


KERNELS: dict[RecipeName, Kernel] = {
    "tensorwise": Kernel((8, 9)),
    "rowwise": Kernel((8, 9)),
    "blockwise": Kernel((9, 0), (9, 0), BLOCK_WISE_CUBLASLT),
}
"""Recipes that are not here are emulated everywhere."""


def refusal(recipe: RecipeName, device: Device, dtype: torch.dtype, shape: tuple[int, int, int]) -> str | None:
    """Return why no kernel computes (M, K) by (N, K) transposed in `dtype`, `shape` = (M, N, K); None: one does."""
    kernel = KERNELS.get(recipe)
    if device.kind != "cuda" or kernel is None:
        return f"{recipe} has no kernel on {device.kind}"
    if not kernel.least_capability <= device.capability <= kernel.most_capability:
        has, least = (".".join(map(str, pair)) for pair in (device.capability, kernel.least_capability))
        only = "only" if kernel.most_capability == kernel.least_capability else "or more"
        return f"{recipe} needs compute capability {least} {only}, and the GPU has {has}"
    if device.cublaslt < kernel.least_cublaslt:
        return f"{recipe} needs cuBLASLt {kernel.least_cublaslt}, and torch was built for {device.cublaslt}"
    if dtype is not torch.bfloat16:
        return f"{recipe} has kernels for bf16, and the layer computes in {dtype}"
    for name, size in zip(("N", "K"), shape[1:], strict=True):
        if size % MULTIPLE:
            return f"{name}={size} of a product is not a multiple of {MULTIPLE}"
    return None


def refused_layer(
    recipe: RecipeName, device: Device, layers: Mapping[str, tuple[int, int]], num_tokens: int
) -> str | None:
    """Return why a layer, (out, in) by name, has no kernel in bf16 for one of its products; None: all layers have."""
    for name, (rows, columns) in layers.items():
        for shape in (num_tokens, rows, columns), (num_tokens, columns, rows), (rows, columns, num_tokens):
            if (reason := refusal(recipe, device, torch.bfloat16, shape)) is not None:
                return f"{reason} (layer {name}, {rows} x {columns}, {num_tokens} tokens)"
    return None


def emulated(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Return (M, K) times (N, K) transposed: the values that the codes stand for are multiplied in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (a.values(wide) @ b.values(wide).t()).to(dtype)


def launched(a: Scaled, b: Scaled, dtype: torch.dtype, *, use_fast_accum: bool) -> Tensor:
    """Return the same by the device's kernel. The one of blocks always adds up in fp32."""
    num_rows, a = len(a.codes), _with_whole_rows(a)
    (of_a, scales_a), (of_b, scales_b) = _scaling(a, by_rows=True), _scaling(b, by_rows=False)
    use_fast_accum &= of_a is not ScalingType.BlockWise1x128
    multiply = _opaque_scaled_mm if torch.compiler.is_compiling() else _scaled_mm
    kinds = [of_a.value, of_b.value]
    product = multiply(a.codes, b.codes.t(), [scales_a, scales_b], kinds, dtype, use_fast_accum)
    return product if len(product) == num_rows else product[:num_rows].clone()  # a view could not be changed in place


def _scaled_mm(a: Tensor, b: Tensor, scales: list[Tensor], kinds: list[int], dtype: torch.dtype, fast: bool) -> Tensor:
    of_a, of_b = map(ScalingType, kinds)
    return scaled_mm(a, b, scales[0], of_a, scales[1], of_b, output_dtype=dtype, use_fast_accum=fast)


# Inductor of torch 2.13 calls another kernel, which finds the kinds from the shapes of scales, and refuses padded ones.
_opaque_scaled_mm = torch.library.custom_op("zero::scaled_mm", _scaled_mm, mutates_args=())


@_opaque_scaled_mm.register_fake
def _(a: Tensor, b: Tensor, _scales: Any, _kinds: Any, dtype: torch.dtype, _fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@register_flop_formula(torch.ops.zero.scaled_mm)
def _(a: torch.Size, b: torch.Size, *_others: Any, **_options: Any) -> int:
    return 2 * a.numel() * b[1]


def _with_whole_rows(a: Scaled) -> Scaled:
    """Pad the rows, as of a few tokens, to a multiple of MULTIPLE.

    cuBLASLt reads the scales of each 128 columns from an address that is a multiple of 16 bytes, which torch does not
    check.
    """
    missing = -len(a.codes) % MULTIPLE
    if not missing:
        return a
    codes = F.pad(a.codes.view(torch.uint8), (0, 0, 0, missing)).view(CODES)
    scales = F.pad(a.scales, (0, 0, 0, missing), value=1.0) if a.blocks.rows == 1 else a.scales
    return a._replace(codes=codes, scales=scales)


def _scaling(matrix: Scaled, *, by_rows: bool) -> tuple[ScalingType, Tensor]:
    """Return the kind of scaling, and the scales in the layout that cuBLASLt reads."""
    scales = matrix.scales
    if matrix.blocks == Blocks():
        return ScalingType.TensorWise, scales.view(())
    if matrix.blocks == Blocks(1):
        return ScalingType.RowWise, scales if by_rows else scales.t()
    if matrix.blocks.rows == 1:
        return ScalingType.BlockWise1x128, scales.t().contiguous().t()
    missing = -scales.shape[1] % BLOCKS_OF_COLUMNS
    padded = F.pad(scales, (0, missing)).contiguous()  # K is the first dim of the transposed view
    return ScalingType.BlockWise128x128, padded.t()
