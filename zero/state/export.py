"""The whole weights of a model in training: to a folder for transformers' `from_pretrained`, or to memory."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from zero.engine import ZeroDataParallel
from zero.state.weight_files import FILE_BYTES, WeightFiles, WholeWeights, export_units, named_parameters_of

COMPILED = "_orig_mod."  # in the names of a module that torch.compile has wrapped


def export(
    folder: str | Path,
    model: ZeroDataParallel,
    *,
    config: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    tensor: Axis | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights to a new folder that `from_pretrained` opens. All ranks call it.

    One unit at a time is unsharded, and the first rank writes it, in `dtype` if it is given: from the master weights if
    that is a longer type than the module's. Names are those of the module's `state_dict`; of tied weights the first is
    written. `config` and `tokenizer` are saved by their own `save_pretrained`; `config` is by default that of the
    module. `tensor` is the axis along which the model itself is split. Raises OSError on the first rank if it cannot
    write, or if the folder is not empty.
    """
    module, output = model.module, Path(folder).absolute()
    state = {name.replace(COMPILED, ""): value for name, value in module.state_dict(keep_vars=True).items()}
    names = {id(value): name for name, value in reversed(state.items()) if isinstance(value, nn.Parameter)}
    params = dict(module.named_parameters())

    def convert(name: str, value: Tensor) -> dict[str, Tensor]:
        written = value.to(dtype) if dtype and value.is_floating_point() else value
        return {names.get(id(params.get(name)), name): written}

    def finish(files: WeightFiles, partial: Path) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                for part_name, tensor in convert(name, value).items():
                    files.add(part_name, tensor)
        files.finish()
        written = dtype or next(module.parameters()).dtype
        described = _described(config or getattr(module, "config", None), module, written)
        for part in (described, getattr(module, "generation_config", None), tokenizer):
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(partial)

    own = next(module.parameters()).dtype
    masters = dtype is not None and dtype.itemsize > own.itemsize
    weights = WholeWeights(model, tensor or Axis.trivial("tensor"), masters)
    export_units(output, weights, convert, finish, file_bytes=file_bytes)


def full_state_dict(model: ZeroDataParallel, *, masters: bool = False) -> dict[str, Any]:
    """Return what `state_dict()` of the module inside `model` returns without partitioning, in memory of the CPU.

    All ranks must call this together; the first data-parallel rank gets the state, and the others an empty dictionary.
    Parameters are unsharded a unit at a time, so that the accelerator never holds all of them. With `masters` their
    values are those of the master weights of the last step: in fp32, if the module is in bf16 or fp16.
    """
    state = model.module.state_dict(keep_vars=True)  # of parameters it reads no values
    params = {name: param for flat in model.flats for name, param in named_parameters_of(flat)}
    whole = WholeWeights(model, Axis.trivial("tensor"), masters)
    full = {params[name]: value.to("cpu", copy=True) for name, value in whole}
    return {name: _value(value, full) for name, value in state.items()} if model.data.rank == 0 else {}


def _value(value: Any, full: Mapping[nn.Parameter, Tensor]) -> Any:
    if isinstance(value, nn.Parameter) and value in full:
        return full[value]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _described(config: Any, module: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of a configuration of transformers that names the class of the module and the dtype."""
    if not hasattr(config, "save_pretrained"):
        return None
    config = copy.deepcopy(config)
    config.architectures = [type(getattr(module, "_orig_mod", module)).__name__]
    config.dtype = dtype
    return config
