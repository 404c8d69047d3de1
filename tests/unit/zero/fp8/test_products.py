"""Products in FP8: their codes, the three products of a layer against fp64, and where there are kernels."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zero.fp8
from parallel.validation.errors import ConfigError
from zero.fp8.kernels import Device, emulated, launched, refusal, refused_layer
from zero.fp8.products import ScaledProducts
from zero.fp8.scaling import LARGEST, RECIPES, SMALLEST_NORMAL, quantize, scale_of, scaled_weights

H100, B200, L40 = (Device("cuda", capability, 130000) for capability in ((9, 0), (10, 0), (8, 9)))
CPU = Device("cpu")
SHAPES = [(1, 1, 1), (16, 16, 16), (70, 130, 48), (129, 257, 3), (128, 128, 128)]  # tokens, in, out


def operands(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and the gradient of y, of magnitudes that differ by rows and columns."""
    generator = torch.Generator().manual_seed(0)
    tokens, columns, rows = shape

    def matrix(*size: int) -> Tensor:
        spread = torch.randn(size[0], 1, generator=generator) + torch.randn(1, size[1], generator=generator)
        return (torch.randn(size, generator=generator) * spread.exp()).to(dtype)

    return matrix(tokens, columns), matrix(rows, columns), matrix(tokens, rows)


def bound(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rounding of a sum of K terms in fp32, and of its result in `dtype`."""
    magnitudes = a.abs() @ b.abs().t()
    return magnitudes * (a.shape[1] + 2) * 2.0**-24 + magnitudes * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_the_quantized_operands(recipe, dtype):
    products, row = ScaledProducts(recipe), RECIPES[recipe]
    for shape in SHAPES:
        x, weight, grad = (tensor.requires_grad_() for tensor in operands(shape, dtype))
        y = products.linear(x, weight, None)
        found = y, *torch.autograd.grad(y, [x, weight], grad.detach())
        expected = [
            (quantize(x, row), quantize(weight, row, is_weight=True)),
            (quantize(grad, row), quantize(weight.t(), row, is_weight=True)),
            (quantize(grad.t(), row), quantize(x.t(), row)),
        ]
        for product, (a, b) in zip(found, expected, strict=True):
            values = a.values(torch.float64), b.values(torch.float64)
            difference = (product.double() - values[0] @ values[1].t()).abs()
            assert product.dtype is dtype
            assert (difference <= bound(*values, dtype)).all()


def test_a_layer_takes_what_a_plain_one_takes():
    layer, plain = nn.Linear(24, 8), nn.Linear(24, 8)
    plain.load_state_dict(layer.state_dict())
    assert zero.fp8.convert(nn.Sequential(layer)) == ["0"]
    for shape in ((24,), (0, 24), (2, 0, 24), (3, 24), (2, 3, 24)):
        x = torch.ones(shape, requires_grad=True)
        torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0.1)
        layer(x).sum().backward()
    assert layer.bias.grad.equal(torch.full((8,), 1.0 + 3 + 6))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(3, 24)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="fp16"):
        layer(torch.ones(3, 24, dtype=torch.float16))


def test_layers_that_are_read_by_others_or_are_none_keep_their_precision():
    class Shop(nn.Module):
        def __init__(self):
            super().__init__()
            self.products, self.counter = [1, 2], nn.Linear(8, 8)

    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    assert zero.fp8.convert(nn.ModuleList([Shop(), encoder])) == ["0.counter"]


@pytest.mark.parametrize("num_tokens", [32, 3])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchs_kernel_for_cpus_agrees_with_the_emulation(recipe, num_tokens):
    x, weight, _ = operands((num_tokens, 64, 48))
    a, b = quantize(x, RECIPES[recipe]), quantize(weight, RECIPES[recipe], is_weight=True)
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = launched(a, b, dtype, use_fast_accum=False), emulated(a, b, dtype)
        assert ((found - expected).abs() <= bound(a.values(torch.float32), b.values(torch.float32), dtype)).all()


def test_compiled_products_are_those_of_eager_code():
    x, weight, _ = operands((32, 64, 48))
    a, b = quantize(x, RECIPES["rowwise"]), quantize(weight, RECIPES["rowwise"], is_weight=True)
    compiled = torch.compile(launched, backend="aot_eager", fullgraph=True)
    arguments = a, b, torch.bfloat16
    assert compiled(*arguments, use_fast_accum=False).equal(launched(*arguments, use_fast_accum=False))


def test_inductor_gets_no_product_that_it_replaces_by_a_kernel_that_refuses_padded_scales():
    """The six scales of 768 columns are padded to eight. CPUs have no kernel for them."""
    called = []

    def backend(graph, _inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *_: [torch.empty(16, 48, dtype=torch.bfloat16)]

    x, weight, _ = operands((16, 768, 48))
    a, b = quantize(x, RECIPES["blockwise"]), quantize(weight, RECIPES["blockwise"], is_weight=True)
    compiled = torch.compile(launched, backend=backend, fullgraph=True)
    assert compiled(a, b, torch.bfloat16, use_fast_accum=False).shape == (16, 48)
    assert [name for name in called if "scaled_mm" in name] == ["zero.scaled_mm.default"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_value_is_within_half_a_step_of_its_code(recipe):
    x, _, _ = operands((70, 200, 1), torch.float32)
    scaled = quantize(x, RECIPES[recipe])
    scales = scaled.blocks.split(torch.zeros_like(x)) + scaled.scales[:, None, :, None]
    scales = scales.flatten(2).flatten(0, 1)[:70, :200]
    # Three bits of mantissa, one in E2M1: half a step is 1/16 or 1/4 of the value; E4M3 steps by 2**-9 at least, E2M1
    # by 1/2. The largest values saturate if their scale was rounded, to a power of two or to E4M3.
    saturation = (x.abs() - LARGEST[RECIPES[recipe].code] * scales).clamp(min=0)
    relative, least = (1 / 4, 1 / 4) if RECIPES[recipe].code == "e2m1" else (1 / 16, 2.0**-10)
    error = (scaled.values(torch.float32) - x).abs()
    assert (error <= torch.maximum(relative * x.abs(), least * scales) * (1 + 1e-6) + saturation).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_denormals_and_one_huge_element(recipe, dtype):
    products = ScaledProducts(recipe)
    weight = torch.ones(3, 16, dtype=dtype)
    zeros, tiny, huge = torch.zeros(1, 16, dtype=dtype), torch.zeros(1, 16, dtype=dtype), torch.ones(1, 16, dtype=dtype)
    tiny[0, 0], huge[0, 0] = 2.0**-130, 3e38
    assert quantize(tiny, RECIPES[recipe]).scales.amin() >= SMALLEST_NORMAL
    assert not products.outputs(zeros, [weight], [])[0].any()
    torch.testing.assert_close(
        products.outputs(tiny, [weight], [])[0].float(), torch.full((1, 3), 2.0**-130), rtol=1 / 16, atol=0
    )
    assert products.outputs(huge, [weight], [])[0].float().isfinite().all()


def test_scales_are_quotients_of_tensors():
    """By a number, CUDA and compiled code multiply with its reciprocal: scales would have other bits than a CPU's."""
    divisors = []

    class Divisions(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.div:
                divisors.append(args[1])
            return function(*args, **kwargs or {})

    amax = torch.tensor([0.0, 3.0, 1e-40, torch.inf, torch.nan])
    with Divisions():
        scales = scale_of(amax)
    assert [divisor.tolist()[:3] for divisor in divisors] == [[LARGEST["e4m3"]] * 3]
    assert divisors[0].isnan().tolist() == [False, False, False, True, True], "no compiler takes it for a constant"
    assert scales[:3].tolist() == [1.0, (amax[1] / 448).item(), SMALLEST_NORMAL]
    assert scales[3:].isnan().all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_element_that_is_not_finite_makes_products_nan(recipe, value):
    """A cast to E4M3 saturates in silence: the loss guard would see a finite number."""
    x, weight, _ = operands((4, 256, 8))
    for broken in (x, weight):
        before, broken[1, 3] = broken[1, 3].clone(), value
        (y,) = ScaledProducts(recipe).outputs(x, [weight], [])
        assert (y[1] if broken is x else y[:, 1]).isnan().all()
        broken[1, 3] = before


def test_nvfp4_and_mxfp8_have_their_codes():
    x = torch.tensor([[0.3, 0.7, 1.3, 1.9, 2.6, 3.6, 4.9, 6.0, -5.1] + [0.0] * 7])
    codes = quantize(x * 448, RECIPES["nvfp4"]).codes.float()
    assert codes.tolist() == [[0.5, 0.5, 1.5, 2.0, 3.0, 4.0, 4.0, 6.0, -6.0] + [0.0] * 7]
    scales = quantize(torch.tensor([[3.0] * 32 + [500.0] * 32]), RECIPES["mxfp8"]).scales
    assert scales.tolist() == [[2.0 ** (1 - 8), 2.0 ** (8 - 8)]]


@pytest.mark.parametrize(
    ("recipe", "device", "shape", "names"),
    [
        ("tensorwise", CPU, (16, 16, 16), "cpu"),
        ("tensorwise", Device("cuda", (8, 0), 120900), (16, 16, 16), "8.9 or more, and the GPU has 8.0"),
        ("tensorwise", H100, (16, 24, 16), "N=24"),
        ("rowwise", H100, (16, 16, 8), "K=8"),
        ("blockwise", B200, (16, 16, 16), "9.0 only, and the GPU has 10.0"),
        ("blockwise", Device("cuda", (9, 0), 120800), (16, 16, 16), "120900"),
        ("mxfp8", B200, (32, 32, 32), "no kernel"),
    ],
)
def test_the_table_refuses_what_cuda_refuses(recipe, device, shape, names):
    assert names in refusal(recipe, device, torch.bfloat16, shape)


@pytest.mark.parametrize(("recipe", "device"), [("tensorwise", L40), ("rowwise", B200), ("blockwise", H100)])
def test_the_table_has_kernels_for_bf16(recipe, device):
    assert refusal(recipe, device, torch.bfloat16, (1, 16, 32)) is None
    assert "float32" in refusal(recipe, device, torch.float32, (16, 16, 16))


def test_layers_without_a_kernel_are_named_before_training():
    assert refused_layer("tensorwise", H100, {"up": (64, 32)}, 48) is None
    for layers, num_tokens, number in [({"up": (60, 32)}, 48, "N=60"), ({"up": (64, 32)}, 40, "K=40")]:
        reason = refused_layer("tensorwise", H100, layers, num_tokens)
        assert number in reason
        assert "layer up" in reason


def test_weights_that_others_read_too_are_not_left_to_fp8():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.first, self.second, self.kept = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.head.weight, self.second.weight = self.embedding.weight, self.first.weight

    model = Model()
    assert zero.fp8.convert(model, keep=lambda name, _: name == "kept") == ["head", "first", "second"]
    assert [name for name, _, _ in scaled_weights(model)] == ["first.weight"]


@pytest.mark.parametrize(
    ("module", "options", "named"),
    [
        (nn.Linear(4, 4), {"recipe": "delayed"}, "recipe='delayed' .*tensorwise"),
        (nn.Linear(4, 4).half(), {}, "fp16"),
        (nn.Sequential(nn.LayerNorm(4)), {}, "Sequential has no linear layer"),
        (nn.Linear(4, 4), {"keep": lambda *_: True}, "keep"),
    ],
)
def test_what_cannot_be_converted_is_refused(module, options, named):
    with pytest.raises(ConfigError, match=named):
        zero.fp8.convert(module, **options)


def test_a_product_that_is_traced_has_its_flops():
    codes = torch.empty(16, 32, dtype=torch.float8_e4m3fn, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.zero.scaled_mm(codes, codes.t(), [], [], torch.bfloat16, False)
    assert counter.get_total_flops() == 2 * 16 * 16 * 32
