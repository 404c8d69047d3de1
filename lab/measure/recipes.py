"""The costs of recipes of FP8 and FP4: the rate of products, and the bytes that quantizing an operand moves.

    half precision    x ------------------------------ product
    FP8               x -- amax -- scale -- cast ----- product

Each product takes its own plane of an operand: the gradients of inputs and of weights sum over other dims than forward.
"""

from dataclasses import dataclass

HALF_BITS = 16


@dataclass(frozen=True)
class Recipe:
    """A recipe, whose products run at `rate` of the rate of tensorwise ones of as many bits.

    A plane of an operand costs `amax_bytes` an element to find its scales, and `cast_bytes` to read the operand and to
    write the plane; a kernel that writes two planes reads their operand once. `is_fused` recipes find scales in the
    kernels that write the operand, if they are compiled.
    """

    bits: int
    rate: float
    amax_bytes: float
    cast_bytes: float
    is_fused: bool = False


# Rates: B300 and H200 NVL, products of quantized operands (Transformer Engine's documentation, gemm_profiling; nvfp4
# on a B300, whose peak of FP4 is 3 times that of FP8). That of rowwise is assumed to be blockwise's: the times that
# nanochat gives for its MLP are above the peak of the GPU, and say nothing.
RECIPES = {
    "delayed": Recipe(8, 1.0, 0.0, 2 / 2 + 1),  # scales of earlier steps; one kernel writes both planes
    "tensorwise": Recipe(8, 1.0, 2 / 2, 2 / 2 + 1, is_fused=True),
    "rowwise": Recipe(8, 0.85, 2 / 2, 2 + 1, is_fused=True),  # each plane has scales of its own
    "blockwise": Recipe(8, 0.85, 0.0, 2 + 1 + 4 / 128),  # 128 elements stay on the chip
    "mxfp8": Recipe(8, 0.91, 0.0, 2 / 2 + 1 + 1 / 32),
    "nvfp4": Recipe(4, 0.57, 2 / 2, 2 / 2 + 0.5 + 1 / 16),  # a scale of the tensor beside those of 16 elements
}
