"""Weights out of training, in the form that transformers reads: from a checkpoint, or from ranks that train.

python -m gpt.checkpoint.export runs/quickstart/checkpoints --output weights --dtype bf16
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpt.build import TrainState
from gpt.checkpoint.checkpoint import newest, read_layout
from gpt.model.pretrained import FILE_BYTES, WeightsWriter
from gpt.model.transformer import ModelConfig
from gpt.settings import DTYPES
from parallel.errors import exit_on_config_error
from parallel.tensor.layers import split_dims
from zero.state.saved_state import SavedState, rank_file
from zero.state.sealed_file import verify


def export_checkpoint(checkpoint: Path, output: Path, dtype: torch.dtype, file_bytes: int = FILE_BYTES) -> int:
    """Of the newest in a folder of several. Returns the number of parameters; holds one file's tensors at a time.

    Raises ConfigError where there is none, or a damaged one.
    """
    checkpoint = newest(checkpoint) or checkpoint
    layout = read_layout(checkpoint)
    saved = SavedState(checkpoint, layout["state"])
    for number in range(saved.num_files):
        verify(rank_file(checkpoint, number))
    writer = WeightsWriter(output, ModelConfig(**layout["model"]), file_bytes)
    for name in saved.parameters:
        writer.add(name, saved.whole(name).to(dtype))
    writer.finish()
    return sum(parameter.shape.numel() for parameter in saved.parameters.values())


def export_live(state: TrainState, output: Path) -> None:
    """The weights as they train, in their own type: written by the first rank, one unit gathered, and held, at a time.

    Called by all ranks. Raises OSError on the first, when all units have been gathered: the others count on it.
    """
    failure, partial = None, output.with_name(f".{output.name}.partial")
    largest_unit_bytes = max(flat.full.nbytes for flat in state.model.flats) * state.mesh.tensor.size
    file_bytes = min(FILE_BYTES, largest_unit_bytes)
    writer = WeightsWriter(partial, state.config, file_bytes) if state.mesh.rank == 0 else None
    for name, whole in _whole_parameters(state):
        if writer:
            try:
                writer.add(name, whole)
            except OSError as error:
                failure, writer = error, None
    if failure:
        shutil.rmtree(partial, ignore_errors=True)
        raise failure
    if writer:
        writer.finish()
        shutil.rmtree(output, ignore_errors=True)  # of the same step, before the run went back
        partial.rename(output)


def _whole_parameters(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, joined along both axes; the tensor axis only where the first data-parallel ranks have it."""
    dims, tensor = split_dims(state.model.module), state.mesh.tensor
    for flat in state.model.flats:
        with state.model.gathered(flat.params[:1]):  # and all others of its unit
            for span, param in zip(flat.layout.spans, flat.params, strict=True):
                if state.mesh.data.rank > 0:
                    continue
                own = param.detach().contiguous()
                if span.name not in dims:
                    yield span.name, own
                    continue
                of_all_ranks = own.new_empty(tensor.size, *own.shape)
                tensor.all_gather(own, out=of_all_ranks).wait()
                yield span.name, torch.cat(list(of_all_ranks), dims[span.name])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m gpt.checkpoint.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of several: then the newest")
    parser.add_argument("--output", type=Path, required=True, help="folder that from_pretrained will open")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of the weights")
    options = parser.parse_args(arguments)
    with exit_on_config_error(OSError):
        count = export_checkpoint(options.checkpoint, options.output, DTYPES[options.dtype])
    sys.stdout.write(f"{count:,} parameters in {options.dtype}: {options.output}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
