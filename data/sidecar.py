"""PREFIX.json: facts of a prepared corpus, for people and for settings such as model.vocab_size.

It holds the CRC-32 of the other files of the corpus, and of its own other keys.
"""

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from data.errors import DataError
from parallel.validation.files import FACTS_BYTES, read_limited

TOKENS, INDEX, TOKENIZER = ".bin", ".idx", ".tokenizer.json"  # the files whose checksums are recorded
OWN_CHECKSUM = "crc32"
COUNTS = ("vocab_size", "eod", "documents", "tokens", "empty", "rejected")
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Sidecar:
    """Facts of a prepared corpus.

    `tokenizer` is the value of --tokenizer, or "trained". The tokenizer itself is stored in PREFIX.tokenizer.json.
    `eod` and `bos` are the ids that end and begin a document, `empty` and `rejected` the documents that were left out.
    `vocabulary_hash` is `Tokenizer.vocabulary_hash`; None if an older version prepared the corpus, and so are
    `checksums`: CRC-32s of files by their suffixes. `parts` are the size and the CRC-32 of PREFIX.bin of each part, if
    the tokens of a corpus are in the files of its parts, and `of_corpus` is a hash that these have in common.
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
    vocabulary_hash: str | None = None
    of_corpus: str | None = None
    parts: list[list[int]] = field(default_factory=list)

    @staticmethod
    def path(prefix: str | Path) -> Path:
        return Path(f"{prefix}.json")

    def save(self, prefix: str | Path) -> None:
        facts = dataclasses.asdict(self)
        text = json.dumps(facts | {OWN_CHECKSUM: checksum_of(facts)}, indent=2)
        self.path(prefix).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        """Read PREFIX.json. Raises DataError if it is not what `save` wrote; without a checksum, if a type is wrong."""
        path = cls.path(prefix)
        try:
            facts = json.loads(read_limited(path, FACTS_BYTES))
            if not isinstance(facts, dict):
                raise ValueError(f"it is a JSON {type(facts).__name__}, not an object")
            has_checksum, checksum = OWN_CHECKSUM in facts, facts.pop(OWN_CHECKSUM, None)
            sidecar = cls(**facts)
            sidecar._check_types()
            if has_checksum and checksum != checksum_of(facts):
                raise ValueError(
                    f"it was changed since it was written (remove its key {OWN_CHECKSUM} if that was meant)"
                )
        except (OSError, ValueError, TypeError, RecursionError) as error:
            problem = str(error).partition("\n")[0]
            raise DataError(
                f"cannot read {path}, which data.prepare writes beside the tokens: {problem}; prepare the data again"
            ) from None
        return sidecar

    def _check_types(self) -> None:
        """Raise ValueError or TypeError if a number is none, which a file without checksum may hold."""
        if not isinstance(self.checksums, dict):
            raise TypeError(f"checksums is {str(self.checksums)[:40]!r}, not an object of numbers")
        for name in ("vocabulary_hash", "of_corpus"):
            if not isinstance(text := getattr(self, name), str | None):
                raise TypeError(f"{name} is {str(text)[:40]!r}, not a text")
        if any([type(number) for number in part] != [int, int] or min(part) < 0 for part in self.parts):
            raise TypeError(f"parts is {str(self.parts)[:40]!r}, not a list of pairs of numbers")
        numbers = self.checksums | {name: getattr(self, name) for name in COUNTS}
        if self.bos is not None:
            numbers["bos"] = self.bos
        for name, value in numbers.items():
            if type(value) is not int or value < 0:  # a bool is no number
                raise ValueError(f"{name} is {str(value)[:40]!r}, not a number")
        for name in {"eod", "bos"} & numbers.keys():
            if numbers[name] >= self.vocab_size:
                raise ValueError(f"{name}={numbers[name]} is not below vocab_size={self.vocab_size}")

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


def checksum_of(facts: dict[str, Any]) -> int:
    """Return the CRC-32 of the keys and values of a JSON object."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
