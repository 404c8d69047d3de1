"""Steps in FP8 and FP4, made of a step in half precision, and what their kernels cost."""

import dataclasses

import pytest
import torch

from lab.dryrun.costs.program import Program, as_program
from lab.dryrun.costs.quantized import Quantization, gathered_quantized, quantized
from lab.measure.kernel_costs import kernel_seconds
from lab.measure.recipes import RECIPES
from lab.observe.kernel_log import Kernel, KernelLog
from lab.observe.operation_observer import observe_operations
from parallel.validation.errors import ConfigError
from tests.unit.lab.dryrun.test_costs import PLAIN, event

TOKENS, WIDTH, OUT, VOCAB = 6400, 1280, 2560, 12800
WITH_PEAKS = dataclasses.replace(PLAIN, peak_fp8_tflops=200, peak_fp4_tflops=400, quantized_gemm_fraction=0.5)


def product(m: int, n: int, k: int, phase: str = "forward") -> Kernel:
    return Kernel("mm", phase, 2 * (m * k + k * n + m * n), torch.bfloat16, product=(1, m, n, k))


FORWARD, OF_WEIGHT, HEAD = (
    product(TOKENS, OUT, WIDTH), product(OUT, WIDTH, TOKENS, "backward"), product(TOKENS, VOCAB, WIDTH)
)  # fmt: skip


def names(kernels: list[Kernel]) -> list[str]:
    return [kernel.name for kernel in kernels]


def test_operands_are_quantized_before_each_product_but_the_heads():
    events = [event("all_gather", "data", 8, 8, launched=1, awaited=2)]
    kernels, (moved,) = quantized([FORWARD, OF_WEIGHT, HEAD], events, Quantization("delayed", TOKENS, VOCAB))
    cast, of_delayed = "quantize delayed", "delayed mm"
    assert names(kernels) == [cast, cast, of_delayed, cast, cast, of_delayed, "mm"]
    assert [kernel.num_bytes for kernel in kernels[:2]] == [2 * TOKENS * WIDTH, 2 * WIDTH * OUT]
    assert kernels[2].num_bytes == TOKENS * WIDTH + WIDTH * OUT + 2 * TOKENS * OUT, "operands have a byte an element"
    assert kernels[-1] == HEAD
    assert (moved.launched, moved.awaited) == (3, 6), "events keep their place between the products"


def test_weights_that_are_kept_in_fp8_are_not_quantized_but_the_gradients_operands_are():
    kernels, _ = quantized([FORWARD, OF_WEIGHT], [], Quantization("delayed", TOKENS, weights_are_quantized=True))
    cast = "quantize delayed"
    assert names(kernels) == [cast, "delayed mm", cast, cast, "delayed mm"]


def test_compiled_kernels_find_the_scales_of_what_they_write():
    def cast_bytes(recipe: str, is_compiled: bool) -> int:
        return quantized([FORWARD], [], Quantization(recipe, TOKENS, fuses_amax=is_compiled))[0][0].num_bytes

    numel = TOKENS * WIDTH
    assert cast_bytes("tensorwise", False) == 3 * numel
    assert cast_bytes("tensorwise", True) == cast_bytes("delayed", False) == 2 * numel
    assert cast_bytes("mxfp8", True) == cast_bytes("mxfp8", False), "its blocks stay on the chip in any case"


@pytest.mark.parametrize(("recipe", "tflops"), [("tensorwise", 100), ("blockwise", 85), ("nvfp4", 114)])
def test_a_product_runs_at_the_rate_of_its_recipe(recipe, tflops):
    kernel = dataclasses.replace(product(1280, 1280, 2**20), recipe=recipe, num_bytes=0)  # one round of a hundred tiles
    assert kernel_seconds(kernel, WITH_PEAKS) == pytest.approx(kernel.flops / (tflops * 1e12))
    throttled = dataclasses.replace(WITH_PEAKS, clock_fraction=0.5)
    assert kernel_seconds(kernel, throttled) == pytest.approx(2 * kernel_seconds(kernel, WITH_PEAKS))
    with pytest.raises(ConfigError, match=f"no peak_fp{RECIPES[recipe].bits}_tflops"):
        kernel_seconds(kernel, PLAIN)


def test_casts_have_a_rate_of_memory_of_their_own():
    cast = quantized([FORWARD], [], Quantization("delayed", TOKENS))[0][0]
    cluster = dataclasses.replace(WITH_PEAKS, memory_fraction=0.4, quantizing_fraction=0.8)
    assert kernel_seconds(cast, cluster) == pytest.approx(cast.num_bytes / 0.8e12)


def test_gathers_send_codes_but_those_of_the_embedding():
    gathers = [event("all_gather", "data", 8, size) for size in (1000, 4000)]
    others = [event("reduce_scatter", "data", 8, 1000), event("all_gather", "tensor", 8, 1000)]
    found = gathered_quantized([*gathers, *others], Quantization("mxfp8", TOKENS), {"data"}, 4000)
    assert [one.message_bytes for one in found] == [500, 4000, 1000, 1000]


def test_kernels_that_multiply_codes_are_products_of_their_recipe():
    log = KernelLog(lambda: "forward", is_on_host=lambda _tensor: False)
    codes = torch.empty(32, 64, device="meta", dtype=torch.float8_e4m3fn)
    scales, kind = torch.ones(32, 1, device="meta"), torch.nn.functional.ScalingType.RowWise
    arguments = codes, codes.t(), [scales], [kind.value], [0], [scales.t()], [kind.value], [0], None, torch.bfloat16
    with observe_operations(log):
        torch.ops.aten._scaled_mm_v2(*arguments)
    (kernel,) = log.kernels
    assert (kernel.product, kernel.recipe, kernel.dtype) == ((1, 32, 32, 64), "rowwise", torch.float8_e4m3fn)


def test_saved_products_and_attention_are_not_computed_again():
    sizes = 8, TOKENS, TOKENS, 128
    attend, differentiate = (
        Kernel("attention", "backward", 0, torch.bfloat16, attention=(*sizes, count)) for count in (2, 5)
    )
    again = dataclasses.replace(FORWARD, phase="backward")
    of_input = product(TOKENS, WIDTH, OUT, "backward")
    norm = Kernel("norm", "backward", 1, torch.bfloat16)
    backward = [norm, again, attend, again, OF_WEIGHT, of_input, differentiate, of_input, OF_WEIGHT]
    events = [event("all_gather", "data", 8, 8, launched=1, awaited=5)]
    kernels, (moved,) = as_program([FORWARD, *backward], events, Program(saves_products=True))
    half = (1, TOKENS, OUT // 2, WIDTH)
    assert [kernel.product for kernel in kernels[2:4]] == [half, half]
    assert kernels[4:] == [OF_WEIGHT, of_input, differentiate, of_input, OF_WEIGHT]
    assert (moved.launched, moved.awaited) == (1, 4)


def test_products_that_add_to_the_buffers_leave_no_kernels_that_do():
    kernels = [Kernel(name, "backward", 1, torch.float32) for name in ("add", "add_", "copy_", "mul")]
    found, (moved,) = as_program(
        kernels, [event("all_gather", "data", 8, 8, 3, 4)], Program(accumulates_in_products=True)
    )
    assert names(found) == ["add", "mul"]
    assert (moved.launched, moved.awaited) == (1, 2)
