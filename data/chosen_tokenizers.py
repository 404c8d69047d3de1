"""The tokenizers that a preparation may choose: loaded by name or path, trained, or of single characters."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.errors import DataError
from data.tokenizer import Tokenizer, read_backend

TRAINED_EOD = "<|endoftext|>"
KNOWN_EOD_TOKENS = (TRAINED_EOD, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
NUM_BYTES = 256
MAX_TRAINED_VOCAB_SIZE = 2**24  # the library reserves memory for all entries at once
MAX_TRAINED_WORD_BYTES = 512


def named_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json file, a directory, or the hub.

    `eod_token` ends documents; without it, the first of KNOWN_EOD_TOKENS that the tokenizer has. Raises DataError if
    the tokenizer has none of them.
    """
    path = Path(name)
    if (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    backend = read_backend(path) if path.is_file() else _from_transformers(name)
    candidates = [eod_token] if eod_token else KNOWN_EOD_TOKENS
    for token in candidates:
        if (eod := backend.token_to_id(token)) is not None:
            return Tokenizer(backend, eod)
    raise DataError(f"tokenizer {name} has none of the tokens {', '.join(candidates)}; name its own with --eod_token")


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


def _from_transformers(name: str) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, trust_remote_code=False).backend_tokenizer
    except Exception as error:  # network, files, library or fast tokenizer missing: the remedy is the same
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"cannot load the tokenizer {name} ({reason}); give a tokenizer.json file, a directory or a hub name"
        ) from None
