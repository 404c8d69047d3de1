"""Kernels of FP8 products on a GPU against their emulation, and without a wait of the host."""

import pytest
import torch
from torch import Tensor, nn

import zero.fp8
from parallel.torch_internals import options_of_exact_division
from tests.gpu.waiting import waiting_is_an_error
from zero.fp8.kernels import KERNELS, Device, emulated, launched, refusal
from zero.fp8.scaling import RECIPES, quantize

pytestmark = pytest.mark.gpu
TOKENS, ROWS, COLUMNS = 512, 384, 256
FEW_TOKENS = 1, 3, 20  # as in generation
# Hopper's tensor cores keep 13 bits of each term of 32, relative to the largest; in fp32 these sums are added up.
ROUNDING = 32 * 2.0**-13


@pytest.fixture
def recipe(request, gpu) -> str:
    reason = refusal(request.param, Device.of(gpu), torch.bfloat16, (TOKENS, ROWS, COLUMNS))
    if reason is not None:
        pytest.skip(reason)
    return request.param


def operands(gpu: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(gpu).manual_seed(0)
    shapes = (TOKENS, COLUMNS), (ROWS, COLUMNS), (TOKENS, ROWS)
    return tuple(torch.randn(shape, generator=generator, device=gpu, dtype=torch.bfloat16) for shape in shapes)


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("recipe", KERNELS, indirect=True)
def test_the_three_products_equal_their_emulation(gpu, recipe, use_fast_accum):
    row = RECIPES[recipe]
    x, weight, grad = operands(gpu)
    for a, b in (
        *((quantize(x[:number], row), quantize(weight, row, is_weight=True)) for number in (*FEW_TOKENS, TOKENS)),
        (quantize(grad, row), quantize(weight.t(), row, is_weight=True)),
        (quantize(grad.t(), row), quantize(x.t(), row)),
    ):
        found = launched(a, b, torch.bfloat16, use_fast_accum=use_fast_accum).double()
        magnitudes = a.values(torch.float64).abs() @ b.values(torch.float64).abs().t()
        difference = (found - emulated(a, b, torch.float64)).abs()
        assert (difference <= magnitudes * (ROUNDING + 2.0**-8)).all()


@pytest.mark.parametrize("recipe", KERNELS, indirect=True)
def test_a_layer_does_not_make_the_host_wait(gpu, recipe):
    layer = nn.Linear(COLUMNS, ROWS, device=gpu, dtype=torch.bfloat16)
    zero.fp8.convert(nn.Sequential(layer), recipe)
    x, _, grad = operands(gpu)
    layer(x.requires_grad_()).backward(grad)
    with waiting_is_an_error():
        layer(x).backward(grad)


def test_codes_of_a_gpu_are_those_of_a_cpu(gpu):
    x, weight, _ = operands(gpu)
    for row in RECIPES.values():
        for matrix, is_weight in ((x, False), (weight, True)):
            found, expected = (quantize(m, row, is_weight=is_weight) for m in (matrix, matrix.cpu()))
            assert found.codes.view(torch.uint8).cpu().equal(expected.codes.view(torch.uint8))
            assert found.scales.cpu().equal(expected.scales)


def test_compiled_codes_of_weights_are_those_of_eager_code(gpu):
    if not (options := options_of_exact_division()):
        pytest.skip("this torch cannot compile exact quotients")
    compiled = torch.compile(quantize, options=options)
    _, weight, _ = operands(gpu)
    for row in RECIPES.values():
        if row.same_transposed:  # the recipes that gather codes
            found, expected = (function(weight, row, is_weight=True) for function in (compiled, quantize))
            assert found.codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))
            assert found.scales.equal(expected.scales)


@pytest.mark.parametrize("recipe", KERNELS, indirect=True)
def test_a_compiled_product_is_that_of_eager_code_with_padded_scales_too(gpu, recipe):
    x, weight = (torch.randn(rows, 768, device=gpu, dtype=torch.bfloat16) for rows in (TOKENS, ROWS))
    a, b = quantize(x, RECIPES[recipe]), quantize(weight, RECIPES[recipe], is_weight=True)
    found, expected = (
        function(a, b, torch.bfloat16, use_fast_accum=False) for function in (torch.compile(launched), launched)
    )
    assert found.equal(expected)
