"""Blocks of a GPT whose linear layers multiply in FP8."""

import logging
from collections.abc import Iterable

from gpt.model.transformer import GPT
from gpt.settings.training import TrainSettings
from parallel.tensor.heads import GroupedHeads
from parallel.validation.errors import ConfigError
from zero.fp8.kernels import Device, refused_layer
from zero.fp8.layers import convert

logger = logging.getLogger(__name__)


def convert_blocks(gpt: GPT, train: TrainSettings, device: Device) -> None:
    """Let the linear layers of blocks multiply in FP8. Raises ConfigError if the device cannot."""
    fp8, num_blocks = train.fp8, gpt.config.num_layers
    if fp8.keep_first + fp8.keep_last >= num_blocks:
        raise ConfigError(
            f"train.fp8.keep_first={fp8.keep_first} and keep_last={fp8.keep_last} leave none of {num_blocks} blocks to "
            "train.matmul=fp8; keep fewer"
        )
    names = convert(
        gpt,
        fp8.recipe,
        keep=lambda name, _layer: not fp8.takes(name, num_blocks),
        use_fast_accum=fp8.use_fast_accum,
        emulate=fp8.emulate,
        device=device,
    )
    emulates = fp8.emulate or device.kind == "cpu"
    if not emulates:
        num_tokens = train.micro_batch_size * gpt.config.seq_length // gpt.tokens.context.size
        if (reason := refused_layer(fp8.recipe, device, product_shapes(gpt, names), num_tokens)) is not None:
            raise ConfigError(
                f"train.fp8.recipe={fp8.recipe}: {reason}; choose another recipe, train.matmul=null, or "
                "train.fp8.emulate=true, which is slower than bf16"
            )
    logger.info("products: %s FP8 in %d layers%s", fp8.recipe, len(names), ", emulated" if emulates else "")


def product_shapes(gpt: GPT, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the weights of some layers, as far as this tensor rank multiplies by them, by name."""
    found = {}
    for layer_name, layer in ((name, gpt.get_submodule(name)) for name in names):
        for name, weight in layer.named_parameters(recurse=False):
            if weight.dim() == 2:
                rows = weight.shape[0]
                if isinstance(layer, GroupedHeads) and name in layer.shared_dims:
                    rows = layer.rows_of_head
                found[f"{layer_name}.{name}"] = rows, weight.shape[1]
    return found
