"""The whole weights of a model in training, unit by unit, and files of them for transformers' `from_pretrained`.

model.safetensors.index.json, model-00001-of-00003.safetensors, ..., config.json, and the files of the tokenizer
"""

import errno
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from parallel.errors import ConfigError
from parallel.mesh import Axis
from parallel.tensor.split_parameters import split_dims
from zero.buckets.flat import FlatParameters
from zero.engine import ZeroDataParallel
from zero.state.tensor_file import write_tensors

FILE_BYTES = 2**28
STEM = "model"  # of the names of files, by which transformers finds them
INDEX = f"{STEM}.safetensors.index.json"

Convert = Callable[[str, Tensor], Mapping[str, Tensor]]  # a parameter -> what is written of it, by name


class WeightFiles:
    """A writer of a folder of weights, tensor by tensor. It holds at most `file_bytes` of them, or one larger tensor.

    Raises ConfigError if the folder already holds weights, because a reader would mix them with these.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES):
        self._folder, self._file_bytes = folder, file_bytes
        self._held: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []  # {name of a tensor: bytes} for each file that is written
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} holds .safetensors files already; choose another folder, or empty it")

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor, on any device. Raises OSError if a write fails."""
        # A copy, because the memory of the parameter's unit is freed before the file is written.
        held = tensor.detach().to("cpu", copy=True)
        if sum(tensor.nbytes for tensor in self._held.values()) + held.nbytes > self._file_bytes:
            self._write_held()
        self._held[name] = held

    def finish(self) -> None:
        """Write the rest of the tensors, and the index. Raises OSError if a write fails."""
        self._write_held()
        # Files get the names that readers look for when all of them are written: the names contain their number.
        names = [f"{STEM}-{n:05d}-of-{len(self._files):05d}.safetensors" for n in range(1, len(self._files) + 1)]
        for number, name in enumerate(names):
            self._partial(number).rename(self._folder / name)
        index = {
            "metadata": {"total_size": sum(sum(held.values()) for held in self._files)},
            "weight_map": {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held},
        }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))

    def _write_held(self) -> None:
        if self._held:
            write_tensors(self._partial(len(self._files)), self._held, {"format": "pt"})
            self._files.append({name: tensor.nbytes for name, tensor in self._held.items()})
            self._held = {}

    def _partial(self, number: int) -> Path:
        return self._folder / f".{STEM}-{number}.partial"


def export_units(
    output: Path,
    model: ZeroDataParallel,
    tensor: Axis,
    convert: Convert,
    finish: Callable[[WeightFiles, Path], None],
    *,
    replaces: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write what `convert` makes of each parameter to a folder that is complete or does not exist. All ranks call it.

    The first rank writes, and then calls `finish` with its writer and the folder. Raises OSError on the first rank if
    it cannot write, or if the folder holds files, unless `replaces`.
    """
    parameters = whole_parameters(model, tensor)
    if model.data.rank > 0 or tensor.rank > 0:
        deque(parameters, maxlen=0)  # only takes part in their collectives
        return
    partial = output.with_name(f".{output.name}.partial")
    largest_unit_bytes = max(flat.full.nbytes for flat in model.flats) * tensor.size
    try:
        if not replaces and output.exists() and any(output.iterdir()):
            raise FileExistsError(errno.EEXIST, "the folder is not empty; choose another one", str(output))
        shutil.rmtree(partial, ignore_errors=True)
        files = WeightFiles(partial, min(file_bytes, largest_unit_bytes))
        for name, whole in parameters:
            for part_name, part in convert(name, whole.cpu()).items():
                files.add(part_name, part)
        finish(files, partial)
        # The folder gets its final name only when it is complete.
        shutil.rmtree(output, ignore_errors=True)
        partial.rename(output)
    except Exception:
        deque(parameters, maxlen=0)  # the other ranks wait for this one in the collectives of the units that are left
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def whole_parameters(model: ZeroDataParallel, tensor: Axis) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole parameter) on the ranks whose data rank is 0; the others only take part in unsharding.

    Parameters are unsharded over the data axis, and those that are split are gathered over the tensor axis.
    """
    dims = split_dims(model.module)
    for flat in model.flats:
        with torch.no_grad(), model.gathered(flat.params[:1]):  # one parameter is enough to unshard the whole unit
            for name, param in named_parameters_of(flat) if model.data.rank == 0 else ():
                own = param.detach().contiguous()
                if name not in dims:
                    yield name, own
                    continue
                of_all_ranks = own.new_empty(tensor.size, *own.shape)
                tensor.all_gather(own, out=of_all_ranks).wait()
                yield name, torch.cat(list(of_all_ranks), dims[name])


def named_parameters_of(flat: FlatParameters) -> Iterator[tuple[str, nn.Parameter]]:
    return ((span.name, param) for span, param in zip(flat.layout.spans, flat.params, strict=True))
