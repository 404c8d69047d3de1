"""The data of a run: batches for training and validation, and the tokenizer that they were made with."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from data.batches import BatchLoader
from data.blend import BlendedSamples, open_samples, parse_path
from data.indexed import IndexedDataset, check_index
from data.sidecar import Sidecar
from data.tokenizer import Tokenizer, identity_of, load_tokenizer, tokenizer_path
from gpt.checkpoint.layout import Progress
from gpt.mixture import arrange
from gpt.settings.data import DataSettings
from gpt.settings.schedule import consumed_samples_after
from gpt.settings.training import TrainSettings
from gpt.shape.config import ModelConfig
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World

NUM_PROMPTS, PROMPT_TOKENS = 3, 8  # if the settings give none
MOST_PADDING = 0.01  # of all positions; more is a warning

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """The batches of a run and their tokenizer.

    `tokenizer` is None for token files that another program has written; no text is then generated.
    """

    training: BatchLoader
    samples: BlendedSamples  # of training
    validation: dict[str, BatchLoader]  # by the name of a corpus; "" is the validation share of the training data
    tokenizer: Tokenizer | None
    prompts: list[list[int]]  # token ids, for texts that the model generates
    tokens_per_sample: float  # of training; padding does not count

    @classmethod
    def open(
        cls, data: DataSettings, model: ModelConfig, train: TrainSettings, mesh: Mesh, world: World, num_units: int = 1
    ) -> Self:
        """Open the data of the run. `num_units`: of ranks that have consecutive micro-batches of a step.

        Raises DataError or ConfigError if the files and the settings do not fit together.
        """
        _, prefixes = parse_path(data.path)
        num_evaluated = train.eval_samples
        validated = {Path(prefix).name: prefix for prefix in data.validation} if num_evaluated else {}
        _check_files([*prefixes, *validated.values()], model.vocab_size, mesh, world)
        _check_tokenizers([*prefixes, *validated.values()])

        def samples_of(
            part: str, path: str | list[str] = data.path, split: Sequence[float] = data.split
        ) -> BlendedSamples:
            samples = open_samples(
                path,
                part,
                split=split,
                seq_length=model.seq_length,
                seed=train.seed,
                cache_dir=data.cache_dir,
                checks_index=False,
                checks_cache=world.local_rank == 0,
                packing=data.packing,
                masks_documents=data.mask_documents,
            )
            if part == "train":
                arrange(samples, data.schedule, train, Progress())
            if data.packing == "best_fit":
                _log_padding(part, samples.tokens_per_sample / model.seq_length)
            return samples

        training = samples_of("train")
        own = {"": samples_of("validation")} if num_evaluated and not validated else {}
        validation = own | {name: samples_of("validation", prefix, (0, 1, 0)) for name, prefix in validated.items()}
        evaluated = [(samples, num_evaluated) for samples in validation.values()]
        _build_caches([(training, consumed_samples_after(train, train.steps)), *evaluated], mesh, world)
        tokenizer = load_tokenizer(prefixes[0]) if tokenizer_path(prefixes[0]).is_file() else None
        loader = partial(_loader, model=model, train=train, mesh=mesh, world=world, num_units=num_units)
        return cls(
            training=loader(training),
            samples=training,
            validation={name: loader(samples) for name, samples in validation.items()},
            tokenizer=tokenizer,
            prompts=_prompts(train.prompts, tokenizer, next(iter(validation.values()), training)) if tokenizer else [],
            tokens_per_sample=training.tokens_per_sample,
        )


def _build_caches(opened: Sequence[tuple[BlendedSamples, int]], mesh: Mesh, world: World) -> None:
    """Build the indices on the first rank, then on one of each node that lacks them, before all ranks map them."""
    for is_builder in (world.is_first, world.local_rank == 0 and not world.is_first):
        for samples, num_samples in opened if is_builder else ():
            with mesh.log.busy():
                samples.build_cache(0, num_samples)
        mesh.barrier()


def _loader(
    samples: BlendedSamples, model: ModelConfig, train: TrainSettings, mesh: Mesh, world: World, num_units: int
) -> BatchLoader:
    return BatchLoader(
        samples,
        micro_batch_size=train.micro_batch_size,
        data_rank=mesh.batch_rank,
        data_size=mesh.num_batch_ranks,
        vocab_size=model.vocab_size,
        pin_memory=world.device.type == "cuda",
        num_units=num_units,
    )


def _log_padding(part: str, filled: float) -> None:
    """Log the share of padding in packed samples; as a warning if it is large."""
    is_large = 1 - filled > MOST_PADDING
    logger.log(
        logging.WARNING if is_large else logging.INFO,
        "%s: %.3f%% of the positions are padding%s",
        part,
        100 * (1 - filled),
        "; few documents fit together: raise model.seq_length, or choose data.packing=stream" if is_large else "",
    )


def _prompts(texts: Sequence[str] | None, tokenizer: Tokenizer, samples: BlendedSamples) -> list[list[int]]:
    """Return the ids of the prompts, or the beginnings of the first samples. All ranks have the same."""
    if texts is None:
        # The tokens are the only row of a sample, or the first one if documents are kept apart.
        return [np.atleast_2d(samples[number])[0, :PROMPT_TOKENS].tolist() for number in range(NUM_PROMPTS)]
    return [[*tokenizer.beginning, *tokenizer.encode(text)] or [tokenizer.eod] for text in texts]


def _check_tokenizers(prefixes: Sequence[str]) -> None:
    """Raise ConfigError if an id means another token in some corpus; warn of those for which it is not known."""
    if len(prefixes) < 2:
        return
    found = {prefix: identity_of(prefix) for prefix in prefixes}
    known = {prefix: identity for prefix, identity in found.items() if identity}
    first = next(iter(known), None)
    for prefix, identity in found.items():
        if identity is None:
            logger.warning(
                "%s has no tokenizer: whether the other corpora were encoded with the same is not known", prefix
            )
        elif first and identity != known[first]:
            raise ConfigError(
                f"{prefix} was encoded with another tokenizer than {first}: the same id is not the same token, or ends "
                f"or begins documents in one only; prepare it again with --tokenizer {first}"
            )


def _check_files(prefixes: Sequence[str], model_vocab_size: int, mesh: Mesh, world: World) -> None:
    """Check vocabularies, and on one rank of each node whole indices, before the others use them.

    Raises ConfigError if the vocabulary of any token file exceeds the model's.
    """
    for prefix in prefixes:
        if Sidecar.path(prefix).is_file() and (size := Sidecar.load(prefix).vocab_size) > model_vocab_size:
            raise ConfigError(
                f"model.vocab_size={model_vocab_size} is below the {size} ids of {prefix}; choose {size} or more"
            )
    for prefix in prefixes if world.local_rank == 0 else ():
        with mesh.log.busy():
            check_index(IndexedDataset(prefix))
    mesh.barrier()
