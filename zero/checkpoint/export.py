"""The whole weights of a model in training, unit by unit: a folder for transformers' `from_pretrained`, or in memory.

model.safetensors.index.json, model-00001-of-00003.safetensors, ..., config.json, and the files of the tokenizer
"""

import copy
import errno
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from parallel.validation.errors import ConfigError
from parallel.validation.paths import remove
from zero.checkpoint.tensor_file import write_tensors
from zero.core.buckets.flat import FlatParameters
from zero.core.partition.layout import cut
from zero.data_parallel import ZeroDataParallel

FILE_BYTES = 2**28
STEM = "model"  # of the names of files, by which transformers finds them
INDEX = f"{STEM}.safetensors.index.json"
COMPILED = "_orig_mod."  # in the names of a module that torch.compile has wrapped

Write = Callable[[Path, Iterator[tuple[str, Tensor]], int], None]  # (folder, whole parameters, bytes of a file)


def write_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES) -> None:
    """Write tensors, on any device, to a folder of weights; hold at most `file_bytes` of them, or one larger tensor.

    Raises ConfigError if the folder already holds weights, because a reader would mix them with these, or a link, and
    OSError if a write fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds .safetensors files already; choose another folder, or empty it")
    if link := next((path.name for path in folder.iterdir() if path.is_symlink()), None):
        raise ConfigError(f"{folder} holds the link {link}, and what it names might be written; choose another folder")
    files: list[dict[str, int]] = []  # {name of a tensor: bytes} for each file that is written
    for held in _held_in_turn(tensors, file_bytes):
        write_tensors(folder / f".{STEM}-{len(files)}.partial", held, {"format": "pt"})
        files.append({name: tensor.nbytes for name, tensor in held.items()})
    # Files get the names that readers look for when all of them are written: the names contain their number.
    names = [f"{STEM}-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for number, name in enumerate(names):
        (folder / f".{STEM}-{number}.partial").rename(folder / name)
    index = {
        "metadata": {"total_size": sum(sum(held.values()) for held in files)},
        "weight_map": {tensor: name for name, held in zip(names, files, strict=True) for tensor in held},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _held_in_turn(tensors: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after the other, in memory of their own that is freed before the next ones."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        # A copy, because the memory of the parameter's unit is freed before the file is written.
        copied = tensor.detach().to("cpu", copy=True)
        if held and sum(tensor.nbytes for tensor in held.values()) + copied.nbytes > file_bytes:
            yield held
            held.clear()
        held[name] = copied
    if held:
        yield held


@torch.no_grad()
def whole_weights(model: ZeroDataParallel, tensor: Axis, *, masters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, whole parameter), or its master weights of the last step, where the data rank is 0.

    All ranks iterate together: the others only take part in unsharding. Parameters are unsharded over the data axis,
    and those that are split are gathered over `tensor`, the axis along which the model itself is split.
    """
    dims = split_dims(model.module)
    model.check_one_division("whole weights")
    for flat in model.flats:
        for name, values in _unsharded(model, flat, masters=masters):
            if model.data.rank > 0:
                continue
            own = values.detach().contiguous()
            yield name, torch.cat(list(tensor.gather_by_rank(own)), dims[name]) if name in dims else own


def _unsharded(model: ZeroDataParallel, flat: FlatParameters, *, masters: bool) -> Iterator[tuple[str, Tensor]]:
    names = [span.name for span in flat.layout.spans]
    if not masters:
        with model.gathered(flat.params[:1]):  # one parameter is enough to unshard the whole unit
            yield from zip(names, flat.params, strict=True)
        return
    full = torch.empty_like(flat.full, dtype=flat.buckets[0].master.dtype)
    for bucket, of_bucket in zip(flat.buckets, flat.layout.buckets, strict=True):
        for rank, shard in enumerate(model.shard_axis.gather_by_rank(bucket.master.to(full.device))):
            cut(full, of_bucket.ranges(rank).own).copy_(shard)
    for span in flat.layout.spans:
        yield span.name, span.view(full)


def export_units(
    output: Path,
    model: ZeroDataParallel,
    tensor: Axis,
    write: Write,
    file_bytes: int = FILE_BYTES,
    *,
    masters: bool = False,
    replaces: bool = False,
) -> None:
    """Let `write` write `whole_weights` to a folder that is complete or does not exist. All ranks call it.

    The first rank calls `write`, with the most bytes of a file: no more than those of the largest unit, since it holds
    a file in memory. Raises OSError on the first rank if it cannot write, or if the folder holds files,
    unless `replaces`.
    """
    parameters = whole_weights(model, tensor, masters=masters)
    if model.data.rank > 0 or tensor.rank > 0:
        deque(parameters, maxlen=0)  # only takes part in their collectives
        return
    partial = output.with_name(f".{output.name}.partial")
    try:
        if not replaces and output.exists() and any(output.iterdir()):
            raise FileExistsError(errno.EEXIST, "the folder is not empty; choose another one", str(output))
        remove(partial)
        unit_bytes = max(flat.full.nbytes for flat in model.flats) * tensor.size
        write(partial, parameters, min(file_bytes, unit_bytes))
        # The folder gets its final name only when it is complete.
        remove(output)
        partial.rename(output)
    except Exception:
        deque(parameters, maxlen=0)  # the other ranks wait for this one in the collectives of the units that are left
        raise
    finally:
        remove(partial)


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
    module, output = model.module, Path(folder).expanduser().resolve()
    state = {name.replace(COMPILED, ""): value for name, value in module.state_dict(keep_vars=True).items()}
    names = {id(value): name for name, value in reversed(state.items()) if isinstance(value, nn.Parameter)}
    params = dict(module.named_parameters())

    def convert(name: str, value: Tensor) -> tuple[str, Tensor]:
        value = value.cpu()
        written = value.to(dtype) if dtype and value.is_floating_point() else value
        return names.get(id(params.get(name)), name), written

    def write(partial: Path, parameters: Iterator[tuple[str, Tensor]], most_bytes: int) -> None:
        tensors = ((name, value) for name, value in state.items() if isinstance(value, Tensor))
        buffers = ((name, value) for name, value in tensors if not isinstance(value, nn.Parameter))
        converted = (convert(name, value) for name, value in chain(parameters, buffers))
        write_folder(partial, converted, most_bytes)
        written = dtype or next(module.parameters()).dtype
        described = _described(config or getattr(module, "config", None), module, written)
        for part in (described, getattr(module, "generation_config", None), tokenizer):
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(partial)

    own = next(module.parameters()).dtype
    masters = dtype is not None and dtype.itemsize > own.itemsize
    export_units(output, model, tensor or Axis.trivial("tensor"), write, file_bytes, masters=masters)


def full_state_dict(model: ZeroDataParallel, *, masters: bool = False) -> dict[str, Any]:
    """Return what `state_dict()` of the module inside `model` returns without partitioning, in memory of the CPU.

    All ranks must call this together; the first data-parallel rank gets the state, and the others an empty dictionary.
    Parameters are unsharded a unit at a time, so that the accelerator never holds all of them. With `masters` their
    values are those of the master weights of the last step: in fp32, if the module is in bf16 or fp16.
    """
    state = model.module.state_dict(keep_vars=True)  # of parameters it reads no values
    whole = whole_weights(model, Axis.trivial("tensor"), masters=masters)
    full = {model.module.get_parameter(name): value.to("cpu", copy=True) for name, value in whole}
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
