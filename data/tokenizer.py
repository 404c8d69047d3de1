"""Tokenizers, which wrap a `tokenizers.Tokenizer`, and the one of a prepared corpus."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from data.errors import DataError
from data.sidecar import TOKENIZER, Sidecar
from parallel.validation.paths import unlink_link

MAX_ID = 2**31 - 1  # of a token, which is stored as i32
MAX_FILE_BYTES = 128 << 20  # of a tokenizer.json, which takes several times as much memory
NOT_A_BYTE = "\N{CJK UNIFIED IDEOGRAPH-65E5}"  # of which a byte-level tokenizer makes characters of its alphabet


class Tokenizer:
    """A tokenizer with the ids of the tokens that end and begin every document; `bos` is None if none begins it.

    A text that contains the name of a special token is encoded as plain characters, so that it cannot end its document.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eod: int, bos: int | None = None) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eod, self.bos = eod, bos
        with library_errors("the tokenizer cannot encode a text", "give another"):
            has_all_bytes = _has_all_bytes(backend)
        self._unknown = None if has_all_bytes else _unknown_id(backend)
        self._drops_characters = isinstance(backend.model, models.BPE) and not has_all_bytes and self._unknown is None
        self.vocab_size = max(self.vocabulary.values(), default=-1) + 1  # ids may have gaps
        if not 0 < self.vocab_size <= MAX_ID + 1:
            raise DataError(f"the tokenizer has ids below {self.vocab_size}; tokens are stored as 0 to {MAX_ID}")

    @property
    def beginning(self) -> list[int]:
        """The ids that begin a document."""
        return [] if self.bos is None else [self.bos]

    @property
    def start(self) -> int:
        """The id before the first token of a text: the one that begins a document, or ends the one before."""
        return self.eod if self.bos is None else self.bos

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises DataError if the tokenizer lacks one of its characters."""
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of several texts. Raises DataError as `encode` does."""
        with library_errors("the tokenizer cannot encode a text", "give another tokenizer or text"):
            found = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
            dropped = next(filter(None, map(self._dropped, texts)), "") if self._drops_characters else ""
        if dropped:
            raise DataError(f"the tokenizer has no token for {dropped!r}, and drops it; give another tokenizer or text")
        if self._unknown is not None and any(self._unknown in ids for ids in found):
            unknown = self._backend.id_to_token(self._unknown)
            raise DataError(
                f"the tokenizer lacks a character or a word of a text, and has {unknown} in its place; give another "
                "tokenizer or text"
            )
        return found

    def _dropped(self, text: str) -> str:
        """Return a piece of the text for parts of which the model has no token; "" if there is none."""
        model = self._backend.model
        for piece, shown in _pieces(self._backend, text):
            # The offsets of tokens, in bytes, are the sums of their lengths: those of what is dropped are missing.
            covered = max((token.offsets[1] for token in model.tokenize(piece)), default=0)
            if covered < len(piece.encode()):
                return shown
        return ""

    def decode(self, ids: Iterable[int]) -> str:
        added, model = self._backend.get_added_tokens_decoder(), self._backend.model
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            added = {}  # other decoders read tokens together with those around them
        added = {id: token for id, token in added.items() if model.id_to_token(id) is None}
        # The library takes characters of an added token for bytes, if they are of the byte-level alphabet.
        return "".join(
            "".join(added[id].content for id in run) if is_added else self._backend.decode([*run], False)
            for is_added, run in groupby(map(int, ids), added.__contains__)
        )

    def token(self, id: int) -> str:
        """Return the token that has an id."""
        token = self._backend.id_to_token(id)
        assert token is not None, f"the tokenizer has no token {id}"
        return token

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, those that were added to the model's included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def vocabulary_hash(self) -> str:
        """A text that is equal for tokenizers whose ids mean the same tokens."""
        entries = sorted((id, token) for token, id in self.vocabulary.items())
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """The content of its tokenizer.json."""
        return self._backend.to_str(pretty=True)

    @property
    def text_for_others(self) -> str:
        """The content of a tokenizer.json that puts before a text what begins documents, and no more."""
        backend = tokenizers.Tokenizer.from_str(self.text)
        if backend.encode("").ids != self.beginning:
            names = [self.token(id) for id in self.beginning]
            special = list(zip(names, self.beginning, strict=True))
            template = processors.TemplateProcessing(single=[*names, "$A"], special_tokens=special)
            backend.post_processor = template if names else None
        return backend.to_str(pretty=True)

    def save(self, path: str | Path) -> None:
        # Not by the library's own `save`, whose errors are bare Exceptions.
        unlink_link(Path(path))
        Path(path).write_text(self.text, encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path, eod: int, bos: int | None = None) -> Self:
        return cls(read_backend(Path(path)), eod, bos)


def tokenizer_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}{TOKENIZER}")


def load_tokenizer(prefix: str | Path) -> Tokenizer:
    """Return the tokenizer that a prepared corpus was encoded with."""
    sidecar = Sidecar.load(prefix)
    sidecar.check_file(prefix, TOKENIZER)
    return Tokenizer.from_file(tokenizer_path(prefix), sidecar.eod, sidecar.bos)


def identity_of(prefix: str | Path) -> tuple[str, int, int | None] | None:
    """Return what tells the tokens of a corpus from those of other tokenizers: a hash, and what ends and begins texts.

    None if a corpus has no tokenizer beside it.
    """
    if not Sidecar.path(prefix).is_file():
        return None
    sidecar = Sidecar.load(prefix)
    found = sidecar.vocabulary_hash
    if found is None and tokenizer_path(prefix).is_file():
        found = load_tokenizer(prefix).vocabulary_hash
    return None if found is None else (found, sidecar.eod, sidecar.bos)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Return what the library reads from a tokenizer.json file. Raises DataError if it cannot."""
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"the tokenizer {path} has more than {MAX_FILE_BYTES:,} bytes; give another")
    with library_errors(f"cannot read the tokenizer {path}", "give another"):
        return tokenizers.Tokenizer.from_file(str(path))


@contextmanager
def library_errors(problem: str, remedy: str) -> Iterator[None]:
    """Raise DataError for an error of the library in this block: a bare Exception, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem}: {' '.join(str(error).split())}; {remedy}") from None


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id that stands for all that the vocabulary lacks; None if there is none."""
    if isinstance(backend.model, models.Unigram):
        return json.loads(backend.to_str())["model"]["unk_id"]
    token = backend.model.unk_token
    return None if token is None else backend.model.token_to_id(token)


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the model is a BPE with an entry for each byte, which encodes any text."""
    model, alphabet = backend.model, set(pre_tokenizers.ByteLevel.alphabet())
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        alphabet = {f"<0x{byte:02X}>" for byte in range(256)}
    elif not alphabet.issuperset("".join(piece for piece, _ in _pieces(backend, NOT_A_BYTE)) or " "):
        return False
    return all(model.token_to_id(entry) is not None for entry in alphabet)


def _pieces(backend: tokenizers.Tokenizer, text: str) -> Iterator[tuple[str, str]]:
    """Yield (what the model encodes, the characters that it stands for) of each piece of a text."""
    normalizer, splitter = backend.normalizer, backend.pre_tokenizer
    text = normalizer.normalize_str(text) if normalizer else text
    for piece, (start, stop) in splitter.pre_tokenize_str(text) if splitter else [(text, (0, len(text)))]:
        yield piece, text[start:stop]
