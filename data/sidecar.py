"""PREFIX.json: facts of a prepared corpus, for people and for settings such as model.vocab_size.

It holds the CRC-32 of the other files of the corpus, and of its own other keys.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data.errors import DataError

TOKENS, INDEX, TOKENIZER = ".bin", ".idx", ".tokenizer.json"  # the files whose checksums are recorded
OWN_CHECKSUM = "crc32"
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Sidecar:
    """Facts of a prepared corpus.

    `tokenizer` is the value of --tokenizer, or "trained". The tokenizer itself is stored in PREFIX.tokenizer.json.
    `eod` and `bos` are the ids that end and begin a document, `empty` and `rejected` the documents that were left out.
    `checksums` are CRC-32s of files by their suffixes; a corpus prepared by an older version has none.
    """

    vocab_size: int
    eod: int
    tokenizer: str
    documents: int
    tokens: int
    source: list[str]
    bos: int | None = None
    empty: int = 0
    rejected: int = 0
    checksums: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def path(prefix: str | Path) -> Path:
        return Path(f"{prefix}.json")

    def save(self, prefix: str | Path) -> None:
        facts = dataclasses.asdict(self)
        text = json.dumps(facts | {OWN_CHECKSUM: _checksum_of(facts)}, indent=2)
        self.path(prefix).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        """Read PREFIX.json. Raises DataError if it is not what `save` wrote; without a checksum, if a type is wrong."""
        path = cls.path(prefix)
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            problem = _problem(facts)
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error).partition("\n")[0]
        if problem:
            raise DataError(
                f"cannot read {path}, which data.prepare writes beside the tokens: {problem}; prepare the data again"
            )
        return cls(**{name: value for name, value in facts.items() if name != OWN_CHECKSUM})

    def check_file(self, prefix: str | Path, suffix: str) -> None:
        """Raise DataError if the file PREFIX`suffix` is not the one that was written, as far as that is known."""
        path = f"{prefix}{suffix}"
        if (expected := self.checksums.get(suffix)) is None:
            return
        if (actual := file_checksum(path)) != expected:
            raise DataError(
                f"{path} is damaged or belongs to another corpus: its CRC-32 is {actual}, {self.path(prefix)} says "
                f"{expected}; copy or prepare all files again"
            )


def file_checksum(path: str | Path) -> int:
    """Return the CRC-32 of a file. Raises DataError if it cannot be read."""
    checksum = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); copy or prepare it again") from None
    return checksum


def _checksum_of(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is no count


def _is_checksums(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "vocab_size": (_is_count, "a number"),
    "eod": (_is_count, "a number"),
    "tokenizer": (lambda value: isinstance(value, str), "a text"),
    "documents": (_is_count, "a number"),
    "tokens": (_is_count, "a number"),
    "source": (_is_list_of_texts, "a list of texts"),
    "bos": (lambda value: value is None or _is_count(value), "a number or null"),
    "empty": (_is_count, "a number"),
    "rejected": (_is_count, "a number"),
    "checksums": (_is_checksums, "an object of numbers"),
    OWN_CHECKSUM: (_is_count, "a number"),
}
OPTIONAL = {"bos", "empty", "rejected", "checksums", OWN_CHECKSUM}


def _problem(facts: object) -> str | None:
    """Return what is wrong with the content of a file; None if nothing is."""
    if not isinstance(facts, dict):
        return f"it is a JSON {type(facts).__name__}, not an object"
    if wrong := (facts.keys() - KINDS.keys()) or (KINDS.keys() - facts.keys() - OPTIONAL):
        return f"its keys should be {', '.join(KINDS)}, and differ in {', '.join(sorted(wrong))}"
    for name, value in facts.items():
        is_right, kind = KINDS[name]
        if not is_right(value):
            return f"{name} is {str(value)[:40]!r}, not {kind}"
    for name in ("eod", "bos"):
        if (facts.get(name) or 0) >= facts["vocab_size"]:
            return f"{name}={facts[name]} is not below vocab_size={facts['vocab_size']}"
    others = {name: value for name, value in facts.items() if name != OWN_CHECKSUM}
    if facts.get(OWN_CHECKSUM, _checksum_of(others)) != _checksum_of(others):
        return f"it was changed since it was written (remove its key {OWN_CHECKSUM} if that was meant)"
    return None
