"""Conversion of the linear layers of a module to products in FP8."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallel.tensor.layers import SplitLinear
from parallel.validation.errors import ConfigError
from zero.fp8.kernels import Device
from zero.fp8.products import ScaledProducts
from zero.fp8.scaling import RECIPES, RecipeName


class ScaledLinear(nn.Linear):
    """A torch linear layer with products of its own, as a split layer has them."""

    products: ScaledProducts

    def forward(self, x: Tensor) -> Tensor:
        return self.products.linear(x, self.weight, self.bias)


def convert(
    module: nn.Module,
    recipe: RecipeName = "tensorwise",
    *,
    keep: Callable[[str, nn.Module], bool] = lambda _name, _layer: False,
    use_fast_accum: bool = False,
    emulate: bool = False,
    device: Device | None = None,
) -> list[str]:
    """Let the linear layers of a module multiply in FP8, in place, and return their names.

    >>> zero.fp8.convert(module, "tensorwise", keep=lambda name, _: name == "lm_head")
    >>> model = ZeroDataParallel(module, config=ZeroConfig(stage=3, gather_dtype="fp8"))

    Convert before the module is wrapped. Layers are `nn.Linear` and split layers (parallel/tensor); those for which
    `keep` is true, and subclasses of `nn.Linear`, keep their precision. Parameters keep their type, fp32 or bf16.
    `emulate` computes with the values of the codes, which is slower than bf16; on a CPU, which has no kernels, this is
    always so. `device`: one whose kernels are imitated. Linear layers inside `nn.TransformerEncoderLayer`, which in
    evaluation reads their weights by itself, are left as they are.
    Raises ConfigError if nothing is converted, or a parameter is in fp16.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"zero.fp8.convert: recipe={recipe!r} is not known; choose one of {', '.join(RECIPES)}")
    products = ScaledProducts(recipe, emulate, use_fast_accum, device)
    read_by_others = {
        layer for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer) for layer in part.modules()
    }
    names = []
    for name, layer in module.named_modules():
        is_taken = type(layer) is nn.Linear or isinstance(layer, SplitLinear | ScaledLinear)
        if not is_taken or layer in read_by_others or keep(name, layer):
            continue
        if any(weight.dtype is torch.float16 for weight in layer.parameters(recurse=False)):
            raise ConfigError(f"zero.fp8.convert: {name} is in fp16; convert the module to bf16 first")
        if type(layer) is nn.Linear:
            layer.__class__ = ScaledLinear
        layer.products = products
        names.append(name)
    if not names:
        raise ConfigError(f"zero.fp8.convert: {type(module).__name__} has no linear layer to convert; see `keep`")
    return names
