"""PREFIX.json: facts of a prepared corpus, for people and for settings such as model.vocab_size."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from data.errors import DataError


@dataclass(frozen=True)
class Sidecar:
    """Facts of a prepared corpus.

    `tokenizer` is the value of --tokenizer, or "trained". The tokenizer itself is stored in PREFIX.tokenizer.json.
    """

    vocab_size: int
    eod: int
    tokenizer: str
    documents: int
    tokens: int
    source: list[str]

    @staticmethod
    def path(prefix: str | Path) -> Path:
        return Path(f"{prefix}.json")

    def save(self, prefix: str | Path) -> None:
        self.path(prefix).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, prefix: str | Path) -> Self:
        path = cls.path(prefix)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"cannot read {path}, which data.prepare writes beside the tokens: {error}; prepare the data again"
            ) from None
