"""What a run reads: batches for training and validation, and the tokenizer that wrote them."""

from dataclasses import dataclass
from typing import Self

from data.batches import BatchLoader
from data.blend import open_samples, parse_path
from data.sidecar import Sidecar
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_path
from gpt.model.transformer import ModelConfig
from gpt.schedule import consumed_samples_after
from gpt.settings import DataSettings, TrainSettings
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
    def open(cls, data: DataSettings, model: ModelConfig, train: TrainSettings, mesh: Mesh, world: World) -> Self:
        """Raises DataError or ConfigError where the files and the settings don't go together."""
        prefix = _check_vocabulary(data.path, model.vocab_size)

        def loader(part: str, num_samples: int) -> BatchLoader:
            samples = open_samples(
                data.path,
                part,
                split=data.split,
                seq_length=model.seq_length,
                seed=train.seed,
                cache_dir=data.cache_dir,
            )
            if world.local_rank == 0:  # one rank a node builds the indices that the others map
                samples.build_cache(0, num_samples)
            mesh.barrier()
            return BatchLoader(
                samples,
                micro_batch_size=train.micro_batch_size,
                data_rank=mesh.data.rank,
                data_size=mesh.data.size,
                vocab_size=model.vocab_size,
                pin_memory=world.device.type == "cuda",
            )

        return cls(
            training=loader("train", consumed_samples_after(train.batch, train.steps)),
            validation=loader("validation", train.eval_samples) if train.eval_samples else None,
            tokenizer=load_tokenizer(prefix) if tokenizer_path(prefix).is_file() else None,
        )


def _check_vocabulary(path: str | list[str], model_vocab_size: int) -> str:
    """Every prefix's vocabulary must fit the model; returns the first prefix."""
    _, prefixes = parse_path(path)
    for prefix in prefixes:
        if Sidecar.path(prefix).is_file():
            vocab_size = Sidecar.load(prefix).vocab_size
            if vocab_size > model_vocab_size:
                raise ConfigError(
                    f"model.vocab_size={model_vocab_size} is below the {vocab_size} ids of {prefix}; "
                    f"choose {vocab_size} or more"
                )
    return prefixes[0]
