"""Exports the weights of a model in training in the format of transformers."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer
from gpt.builder.train_state import TrainState
from gpt.checkpoint.folder import Kept, checkpoint_name, delete_old
from gpt.checkpoint.layout import INITIAL_WEIGHTS
from gpt.pretrained.families import family_of
from gpt.pretrained.tensors import to_transformers
from gpt.pretrained.weights import companions, write_config
from zero.state.weight_files import WeightFiles, WholeWeights, export_units

logger = logging.getLogger(__name__)


class LiveExports:
    """The exports of a run's weights, of which as many are kept as of its checkpoints."""

    def __init__(self, state: TrainState, folder: Path, kept: Kept, data: Mapping[str, Any]):
        self._state, self._folder, self._kept = state, folder, kept
        self._is_first = state.mesh.rank == 0  # which alone writes
        self._companions = companions(data, data.get(INITIAL_WEIGHTS)) if self._is_first else (None, None)

    def export(self, step: int) -> None:
        """Export the weights of a step. All ranks call it. An export that fails is logged, and training goes on."""
        try:
            export_live(self._state, self._folder / checkpoint_name(step), *self._companions)
            if self._is_first:
                delete_old(self._folder, self._kept)
        except OSError as error:
            logger.error("error: weights cannot be written to %s: %s; training goes on", self._folder, error.strerror)


def export_live(
    state: TrainState, output: Path, tokenizer: Tokenizer | None = None, origin: Path | None = None
) -> None:
    """Export the weights of the model in training, in their own data type; see `write_config`.

    All ranks call it. One unit at a time is unsharded, and written by the first rank. Raises OSError on that rank if it
    cannot write.
    """
    config, family = state.config, family_of(state.config)

    def finish(files: WeightFiles, folder: Path) -> None:
        files.finish()
        write_config(folder, config, tokenizer, origin)

    # A folder of that name is an export of the same step from before a roll-back.
    convert = partial(to_transformers, family=family, config=config)
    export_units(output, WholeWeights(state.model, state.mesh.tensor), convert, finish, replaces=True)
