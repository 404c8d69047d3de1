"""What a run reads: batches for training and validation, and the tokenizer that wrote them."""

from dataclasses import dataclass
from typing import Self

from data.batches import BatchLoader
from data.blend import open_samples, parse_path
from data.sidecar import Sidecar
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_path
from gpt.schedule import consumed_samples_after
from gpt.settings import Settings
from parallel.errors import ConfigError
from parallel.mesh import Mesh
from parallel.world import World


@dataclass(frozen=True)
class Corpus:
    """`tokenizer` is None for files that other programs wrote: they are trained on and no text is sampled."""

    training: BatchLoader
    validation: BatchLoader | None
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, settings: Settings, mesh: Mesh, world: World) -> Self:
        """Raises DataError or ConfigError where the files and the settings don't go together."""
        prefix = _check_vocabulary(settings)

        def loader(part: str, num_samples: int) -> BatchLoader:
            samples = open_samples(
                settings.data.path,
                part,
                split=settings.data.split,
                seq_length=settings.model.seq_length,
                seed=settings.train.seed,
                cache_dir=settings.data.cache_dir,
            )
            if world.local_rank == 0:  # one rank a node builds the indices that the others map
                samples.build_cache(0, num_samples)
            mesh.barrier()
            return BatchLoader(
                samples,
                micro_batch_size=settings.train.micro_batch_size,
                data_rank=mesh.data.rank,
                data_size=mesh.data.size,
                vocab_size=settings.model.vocab_size,
                pin_memory=world.device.type == "cuda",
            )

        train = settings.train
        return cls(
            training=loader("train", consumed_samples_after(train.batch, train.steps)),
            validation=loader("validation", train.eval_samples) if train.eval_samples else None,
            tokenizer=load_tokenizer(prefix) if tokenizer_path(prefix).is_file() else None,
        )


def _check_vocabulary(settings: Settings) -> str:
    """Every prefix's vocabulary must fit the model; returns the first prefix."""
    _, prefixes = parse_path(settings.data.path)
    for prefix in prefixes:
        if Sidecar.path(prefix).is_file():
            vocab_size = Sidecar.load(prefix).vocab_size
            if vocab_size > settings.model.vocab_size:
                raise ConfigError(
                    f"model.vocab_size={settings.model.vocab_size} is below the {vocab_size} ids of {prefix}; "
                    f"choose {vocab_size} or more"
                )
    return prefixes[0]
