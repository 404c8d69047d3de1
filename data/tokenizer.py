"""Tokenizers, which wrap a `tokenizers.Tokenizer`, and the one of a prepared corpus."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

import tokenizers

from data.errors import DataError
from data.sidecar import TOKENIZER, Sidecar
from parallel.validation.paths import unlink_link

MAX_ID = 2**31 - 1  # of a token, which is stored as i32


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
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps
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
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"the tokenizer cannot encode a text: {error}; give another tokenizer or text") from None

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, id: int) -> str:
        """Return the token that has an id."""
        token = self._backend.id_to_token(id)
        assert token is not None, f"the tokenizer has no token {id}"
        return token

    @property
    def text(self) -> str:
        """The content of its tokenizer.json."""
        return self._backend.to_str(pretty=True)

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


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Return what the library reads from a tokenizer.json file. Raises DataError if it cannot."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"cannot read the tokenizer {path}: {error}; give another") from None
