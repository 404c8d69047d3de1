"""Resumes from a checkpoint of another program: a folder of DCP, such as FSDP2's, or a ZeRO checkpoint of DeepSpeed.

Its parameters have the names of this project's GPT, or those of the same model of transformers. A rank's rectangles of
a parameter are then cut into rectangles of transformers' tensors, so it reads what it owns, at any layout.
"""

import logging
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpt.builder.train_state import TrainState
from gpt.checkpoint.layout import Progress
from gpt.families.family import Family
from gpt.pretrained.configuration import family_of
from gpt.pretrained.tensors import HEAD, WORDS, source_of, with_prefix
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from zero.checkpoint.adam import COUNTS_PER_GROUP
from zero.checkpoint.folders.folder import DistributedFolder, Naming, load_state, renamed, same_name
from zero.checkpoint.folders.state import DistributedState
from zero.checkpoint.layout_file import OTHER_WRITERS
from zero.checkpoint.rank_state import check_same
from zero.checkpoint.schema import shown
from zero.checkpoint.state_dicts.chunked_tensor import Chunk, ChunkedTensor

logger = logging.getLogger(__name__)
BEGINNING_BYTES = 1 << 20  # of a file, which ranks compare


def load_foreign(folder: Path, writer: str, state: TrainState, samples_before: Callable[[int], int]) -> Progress:
    """Load weights, optimizer states and a dynamic loss scale, and return the progress. All ranks call it.

    The settings of this run hold, such as betas. No folder names an order of samples, which a warning says; those of
    `writer` DeepSpeed say how many were read, and otherwise they are `samples_before` the step. Raises ConfigError if
    the folder is damaged, or is of another model or optimizer, or if ranks find different ones.
    """
    there = DistributedFolder(folder)
    naming, ignored = _naming(there, state.config)
    names = renamed(DistributedState(state.model, state.optimizer).state_dict()["model"], naming)
    first = next(iter(names))
    for prefix in filter(None, there.prefixes(first)):
        more = [name for name in there.names(prefix) - set(names) if "state." not in name]  # not the optimizer's
        if unknown := [name for name in more if not name.endswith(ignored)]:
            raise ConfigError(
                f"{folder} has {shown(min(unknown))}, which is no parameter of this model; give model.* of the run "
                "that wrote it, or choose another folder"
            )
    load_state(there, state.model, state.optimizer, naming, with_settings=False)
    for name, tensor in DistributedState(state.model, None).state_dict()["model"].items():
        if not all(chunk.values.isfinite().all() for chunk in tensor.chunks):
            raise ConfigError(f"{folder} has values of {name} that are not finite; choose an earlier checkpoint")
    step, num_samples = there.count("global_steps"), there.count("global_samples")
    step = there.count(f"state.{first}.step") if step is None else step
    if step is None:
        raise ConfigError(f"{folder} does not say its number of steps, as states of Adam do; choose another folder")
    described = next(path for pattern in OTHER_WRITERS for path in sorted(folder.glob(pattern)))
    with described.open("rb") as file:  # DCP writes a random number there in each save, DeepSpeed weights
        check_same(state.mesh, zlib.crc32(file.read(BEGINNING_BYTES), step), folder)
    origin = "as many as it has read" if num_samples is not None else f"where {step} steps of this run would end"
    num_samples = samples_before(step) if num_samples is None else num_samples
    logger.warning(
        "%s is a checkpoint of %s, which does not say the order of samples: this run goes on in its own order at "
        "sample %d, %s",
        *(folder, writer, num_samples, origin),
    )
    for update in state.optimizer.updates:
        for group in update.groups.values() if type(update.optimizer).__name__ == COUNTS_PER_GROUP else ():
            group["step"] = step
    return Progress(step, num_samples)


def _naming(there: DistributedFolder, config: ModelConfig) -> tuple[Naming, tuple[str, ...]]:
    """Return the names of parameters in the folder, and the ends of names of tensors that are no parameters."""
    if there.prefixes(WORDS[0]):
        return same_name, ()
    try:
        family = family_of(config)
        if config.width_multiplier != 1:
            raise ConfigError(f"model.mup_base_width={config.mup_base_width} scales logits, which they do not")
    except ConfigError as error:
        raise ConfigError(f"{there.path} has no {WORDS[0]}, and no names of transformers' models: {error}") from error
    tied = (f"{HEAD}weight",) if config.tied_head else ()
    return partial(_to_transformers, family=family, config=config), family.ignored + tied


def _to_transformers(name: str, tensor: Tensor, family: Family, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the tensors of transformers that a parameter, or one of its states, is made of.

    Words that pad the vocabulary here, and are no part of these, keep their values.
    """
    source = source_of(name, family, config)
    names = [with_prefix(theirs, family) for theirs in source.names]
    if not tensor.dim():  # a counter
        return {names[0]: tensor}
    assert isinstance(tensor, ChunkedTensor)
    num_rows = config.vocab_size if name in WORDS else tensor.shape[0]
    shape = torch.Size(source.shape((num_rows, *tensor.shape[1:])))
    return {
        theirs: ChunkedTensor(shape, [Chunk(*rectangle) for rectangle in rectangles], tensor.dtype, tensor.device)
        for theirs, rectangles in zip(names, source.cut(tensor.chunks, num_rows), strict=True)
    }
