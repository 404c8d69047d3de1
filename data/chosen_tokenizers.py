"""The tokenizers that a preparation may choose: loaded by name or path, trained, or of single characters."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.errors import DataError
from data.sidecar import Sidecar
from data.tokenizer import Tokenizer, library_errors, read_backend, tokenizer_path
from parallel.validation.files import FACTS_BYTES, read_limited

TRAINED_EOD = "<|endoftext|>"
KNOWN_EOD_TOKENS = (TRAINED_EOD, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
NO_TOKEN = "none"  # as --bos_token
NUM_BYTES = 256
MAX_TRAINED_VOCAB_SIZE = 2**24  # the library reserves memory for all entries at once
MAX_TRAINED_WORD_BYTES = 512


def named_tokenizer(name: str, eod_token: str | None = None, bos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json file, a directory, the PREFIX of a prepared corpus, or the hub.

    `eod_token` ends documents; without it, the token of the corpus, the first of KNOWN_EOD_TOKENS that the tokenizer
    has, or the `eos_token` of its directory. `bos_token` begins them; without it, the token of the corpus, or the one
    that the tokenizer puts before a text; NO_TOKEN is none. Raises DataError if the tokenizer has no such token.
    """
    folder, corpus, configuration = Path(name), None, {}
    if (path := folder / "tokenizer.json").is_file():
        backend, configuration = read_backend(path), configuration_of(folder)
    elif folder.is_file():
        backend = read_backend(folder)
    elif (path := tokenizer_path(name)).is_file():
        backend, corpus = read_backend(path), Sidecar.load(name) if Sidecar.path(name).is_file() else None
    else:
        backend = _from_transformers(name)
    candidates = [eod_token] if eod_token else [*KNOWN_EOD_TOKENS, *_names(configuration, "eos_token")]
    known = [id for token in candidates if (id := backend.token_to_id(token)) is not None]
    if corpus and not eod_token:
        known = [corpus.eod]
    if not known:
        raise DataError(
            f"tokenizer {name} has none of the tokens {', '.join(candidates)}; name its own with --eod_token"
        )
    if bos_token is None:
        bos = corpus.bos if corpus else first_token(backend, configuration)
    elif (bos := backend.token_to_id(bos_token)) is None and bos_token != NO_TOKEN:
        raise DataError(f"tokenizer {name} has no token {bos_token}; name one as --bos_token, or {NO_TOKEN}")
    tokenizer = Tokenizer(backend, known[0], bos)
    _check_ends({known[0], *tokenizer.beginning}, tokenizer, name)
    return tokenizer


def _check_ends(ids: set[int], tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError if the name of one of these tokens in a text is encoded as the token."""
    for id in ids:
        token = tokenizer.token(id)
        try:
            is_contained = id in tokenizer.encode(token)
        except DataError:  # it lacks a character of the name, and refuses such a text
            continue
        if is_contained:
            raise DataError(
                f"tokenizer {name} encodes {token} in a text as the token that begins or ends a document; give "
                "another, or other tokens with --eod_token and --bos_token"
            )


def configuration_of(folder: Path) -> dict[str, object]:
    """Return the content of tokenizer_config.json in a folder; nothing if there is no such file."""
    path = folder / "tokenizer_config.json"
    try:
        content = json.loads(read_limited(path, FACTS_BYTES)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}; correct it or give tokenizer.json itself") from None
    return content if isinstance(content, dict) else {}


def _names(configuration: dict[str, object], key: str) -> list[str]:
    """Return the special token under a key of tokenizer_config.json, which is a text, or has one as its content."""
    token = configuration.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def first_token(backend: tokenizers.Tokenizer, configuration: dict[str, object]) -> int | None:
    """Return the id that the tokenizer puts before a text, by itself or by its configuration; None if there is none."""
    if configuration.get("add_bos_token") is True and (names := _names(configuration, "bos_token")):
        return backend.token_to_id(names[0])
    backend.no_padding()
    try:
        with library_errors("the tokenizer cannot encode a text", "give another"):
            ids, of_text = (backend.encode("a", add_special_tokens=is_added).ids for is_added in (True, False))
    except DataError:  # it is one of characters, and lacks this one
        return None
    return ids[0] if len(ids) > len(of_text) and ids[:1] != of_text[:1] else None


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
