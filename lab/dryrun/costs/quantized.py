"""A recorded step of half precision as another program runs it with the products of its linear layers in FP8 or FP4.

A dry run of this program with `train.matmul=fp8` needs none of this: it records such products, and what quantizes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lab.dryrun.costs.program import replaced
from lab.measure.recipes import HALF_BITS, RECIPES
from lab.observe.kernel_log import Kernel
from parallel.comm_log import CommEvent
from parallel.mesh import HALF_TYPES


@dataclass(frozen=True)
class Quantization:
    """The way in which a program quantizes the products of its linear layers.

    Products with a dim of `unquantized_size` are left in half precision: the head's, whose dim is the vocabulary.
    `weights_are_quantized` says that weights are gathered, or kept from one update to the next, in the recipe's type.
    """

    recipe: str
    num_tokens: int  # of a micro-batch of a rank, over which gradients of weights sum
    unquantized_size: int = 0
    weights_are_quantized: bool = False
    fuses_amax: bool = False  # the program is compiled


def quantized(
    kernels: Sequence[Kernel], events: Sequence[CommEvent], how: Quantization
) -> tuple[list[Kernel], list[CommEvent]]:
    """Return a step with the kernels of quantized products, each after those that quantize its operands."""
    return replaced(kernels, events, lambda _, kernel: _quantized_product(kernel, how))


def _quantized_product(kernel: Kernel, how: Quantization) -> list[Kernel]:
    """Return a product and what quantizes its operands, or a kernel that is no product of a linear layer as it is."""
    if kernel.product is None or kernel.dtype not in HALF_TYPES or how.unquantized_size in kernel.product[1:]:
        return [kernel]
    recipe, (batch, m, n, k) = RECIPES[how.recipe], kernel.product
    first, second = batch * m * k, batch * k * n
    is_second_a_weight = not (k == how.num_tokens != m)  # else the product is the gradient of a weight
    operands = [first] if is_second_a_weight and how.weights_are_quantized else [first, second]
    plane_bytes = recipe.cast_bytes + (0.0 if how.fuses_amax and recipe.is_fused else recipe.amax_bytes)
    quantizing = replace(kernel, name=f"quantize {how.recipe}", product=None, recipe=how.recipe)
    saved_bytes = (first + second) * (HALF_BITS - recipe.bits) // 8
    product = replace(kernel, name=f"{how.recipe} {kernel.name}", recipe=how.recipe)
    return [
        *(replace(quantizing, num_bytes=round(numel * plane_bytes)) for numel in operands),
        replace(product, num_bytes=kernel.num_bytes - saved_bytes),
    ]


def gathered_quantized(
    events: Sequence[CommEvent], how: Quantization, axes: Collection[str], other_bytes: int
) -> list[CommEvent]:
    """Return events with the gathers along some axes in the recipe's type, but not those of messages of `other_bytes`.

    Scales are left out: at most 1/32 of a recipe that gathers what it multiplies.
    """
    share = RECIPES[how.recipe].bits / HALF_BITS
    return [
        replace(event, message_bytes=round(event.message_bytes * share))
        if event.op == "all_gather" and event.axis in axes and event.message_bytes != other_bytes
        else event
        for event in events
    ]
