"""Exports the weights of a model in training in the format of transformers."""

from functools import partial
from pathlib import Path

from data.tokenizer import Tokenizer
from gpt.builder.train_state import TrainState
from gpt.pretrained.families import family_of
from gpt.pretrained.tensors import to_transformers
from gpt.pretrained.weights import write_config
from zero.state.weight_files import WeightFiles, WholeWeights, export_units


def export_live(state: TrainState, output: Path, tokenizer: Tokenizer | None = None) -> None:
    """Export the weights of the model in training, in their own data type.

    All ranks call it. One unit at a time is unsharded, and written by the first rank. Raises OSError on that rank if it
    cannot write.
    """
    config, family = state.config, family_of(state.config)

    def finish(files: WeightFiles, folder: Path) -> None:
        files.finish()
        write_config(folder, config, tokenizer)

    # A folder of that name is an export of the same step from before a roll-back.
    convert = partial(to_transformers, family=family, config=config)
    export_units(output, WholeWeights(state.model, state.mesh.tensor), convert, finish, replaces=True)
