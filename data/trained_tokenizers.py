"""Tokenizers that are made from the texts of a corpus."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.errors import DataError
from data.tokenizer import TRAINED_EOD, Tokenizer

NUM_BYTES = 256
MAX_TRAINED_VOCAB_SIZE = 2**24  # the library reserves memory for all entries at once
MAX_TRAINED_WORD_BYTES = 512


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries, or fewer if the texts have too few pairs to merge.

    Its id 0 ends documents. Words of more than `MAX_TRAINED_WORD_BYTES`, such as encoded images, are cut while merges
    are counted, because the time to train grows with the square of a word's length. Words are encoded as a whole.
    """
    if vocab_size <= NUM_BYTES:
        raise DataError(
            f"--train_vocab_size={vocab_size} cannot hold {NUM_BYTES} bytes and {TRAINED_EOD}; use 257 or more"
        )
    if vocab_size > MAX_TRAINED_VOCAB_SIZE:
        raise DataError(f"--train_vocab_size={vocab_size} is above {MAX_TRAINED_VOCAB_SIZE}; choose a smaller one")
    backend = tokenizers.Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut_words = pre_tokenizers.FixedLength(length=MAX_TRAINED_WORD_BYTES)
    backend.pre_tokenizer = pre_tokenizers.Sequence([by_bytes, cut_words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TRAINED_EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = by_bytes
    return Tokenizer(backend, eod=0)


def character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with an entry for each character of the texts. Its id 0 ends documents.

    Raises DataError if there are no characters. Other texts may have characters that it cannot encode.
    """
    characters = sorted(set().union(*texts))
    if not characters:
        raise DataError("--characters: the source holds no text; give another")
    vocabulary = {entry: number for number, entry in enumerate([TRAINED_EOD, *characters])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([TRAINED_EOD])
    return Tokenizer(backend, eod=0)
