"""Exports the weights of a checkpoint, or of a model in training, in the format of transformers.

python -m gpt.checkpoint.export runs/quickstart/checkpoints --output weights --dtype bf16
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.errors import DataError
from gpt.builder.train_state import TrainState
from gpt.checkpoint.folder import Kept, checkpoint_name, delete_old, newest
from gpt.checkpoint.layout import INITIAL_WEIGHTS, check_tokenizer, read_run
from gpt.pretrained.tokenizer_files import tokenizer_of_data
from gpt.pretrained.weights import check_shapes, companions, write_weights
from gpt.shape.config import parameter_shapes
from parallel.validation.errors import ConfigError, exit_on_config_error
from parallel.validation.paths import expanded
from zero.checkpoint.export import FILE_BYTES, export_units
from zero.checkpoint.layout_file import LAYOUT, is_complete, verify_file
from zero.checkpoint.saved_state import SavedState
from zero.core.partition.config import DTYPES

logger = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
    data: str | None = None,
    initial_weights: str | None = None,
) -> int:
    """Export a checkpoint, or the newest in a folder of several, and return the number of parameters.

    Only the tensors of one output file are in memory at a time. The tokenizer is that of the corpus with the prefix
    `data`; without it that of the initial weights, whose folder may have moved to `initial_weights`, or of the run's
    data. Raises ConfigError if there is no checkpoint, or if it is damaged.
    """
    given, checkpoint = checkpoint, newest(checkpoint) or checkpoint
    if not is_complete(checkpoint):
        raise ConfigError(
            f"{given} holds no complete checkpoint; give the folder of one, or that of all checkpoints of a run, "
            "run.dir/checkpoints"
        )
    run = read_run(checkpoint)
    for rank in range(len(run.layout["files"])):
        verify_file(checkpoint, run.layout, rank, run.progress.save_name)
    saved = SavedState(checkpoint, run.layout["state"])
    shapes = {name: parameter.shape for name, parameter in saved.parameters.items()}
    check_shapes(shapes, parameter_shapes(run.model, run.model.padded_vocab_size), checkpoint / LAYOUT)
    saved_data = run.layout["data"]
    tokenizer, origin = companions(saved_data, initial_weights or saved_data.get(INITIAL_WEIGHTS))
    if data:
        tokenizer = tokenizer_of_data({"data.path": data})
    if tokenizer:
        remedy = "name the data that it was trained on with --data"
        check_tokenizer(checkpoint, saved_data, tokenizer.vocabulary_hash, remedy)
    weights = ((name, saved.whole(name, dtype=dtype)) for name in saved.parameters)
    write_weights(output, run.model, weights, tokenizer, file_bytes, origin)
    return sum(shape.numel() for shape in shapes.values())


class LiveExports:
    """The exports of a run's weights, of which as many are kept as of its checkpoints."""

    def __init__(
        self,
        state: TrainState,
        folder: Path,
        kept: Kept,
        data: Mapping[str, Any],
        on_failure: Callable[[str], None] = logger.error,
    ):
        self._state, self._folder, self._kept, self._on_failure = state, folder, kept, on_failure
        self._is_first = state.mesh.rank == 0  # which alone writes
        self._companions = companions(data, data.get(INITIAL_WEIGHTS)) if self._is_first else (None, None)

    def export(self, step: int) -> None:
        """Export the weights of a step, in their own data type; see `write_weights`. All ranks call it.

        One unit at a time is unsharded, and written by the first rank. An export that fails is logged, and training
        goes on.
        """
        tokenizer, origin = self._companions

        def write(folder: Path, parameters: Iterator[tuple[str, Tensor]], file_bytes: int) -> None:
            write_weights(folder, self._state.config, parameters, tokenizer, file_bytes, origin)

        try:
            # A folder of that name is an export of the same step from before a roll-back.
            output = self._folder / checkpoint_name(step)
            export_units(output, self._state.model, self._state.mesh.tensor, write, replaces=True)
            if self._is_first:
                delete_old(self._folder, self._kept)
        except OSError as error:
            self._on_failure(f"weights cannot be written to {self._folder}: {error.strerror}")


def main(arguments: list[str]) -> None:
    def path(text: str) -> Path:
        return Path(expanded(text))

    parser = argparse.ArgumentParser(prog="python -m gpt.checkpoint.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=path, help="folder of a checkpoint, or of several: then the newest")
    parser.add_argument("--output", type=path, required=True, help="folder that from_pretrained will open")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of the weights")
    parser.add_argument("--data", type=expanded, help="PREFIX of the corpus whose tokenizer is exported (the run's)")
    parser.add_argument("--initial_weights", type=expanded, help="the folder from which the run began, if it has moved")
    options = parser.parse_args(arguments)
    with exit_on_config_error(OSError, DataError):
        count = export_checkpoint(
            options.checkpoint,
            options.output,
            DTYPES[options.dtype],
            data=options.data,
            initial_weights=options.initial_weights,
        )
    sys.stdout.write(f"{count:,} parameters in {options.dtype}: {options.output}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
