"""The files beside exported weights by which transformers opens the tokenizer of the training data.

tokenizer.json, tokenizer_config.json, generation_config.json
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.blend import parse_path
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_path
from gpt.shape.config import ModelConfig
from parallel.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a corpus; None if weights are exported without one."""

    tokenizer: Tokenizer | None = None

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> "TokenizerFiles":
        """Return the tokenizer of the first corpus of the settings `data`, by the names of their options.

        Without its files, a warning is logged. Raises DataError if the files are damaged.
        """
        path = data.get("data.path")
        entries = [path] if isinstance(path, str) else path if isinstance(path, list) else []
        prefix = parse_path(entries)[1][0] if entries and all(isinstance(entry, str) for entry in entries) else None
        if prefix is None or not tokenizer_path(prefix).is_file():
            logger.warning(
                "the exported folder has no tokenizer: %s does not exist, and transformers would open an empty one; "
                "name the data that python -m data.prepare has written with --data",
                tokenizer_path(prefix) if prefix else "PREFIX.tokenizer.json",
            )
            return cls()
        return cls(load_tokenizer(prefix))

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids for config.json: the end of a document ends a text, and begins one, as in GPT-2."""
        end = self.tokenizer.eod if self.tokenizer else None
        return {"bos_token_id": end, "eos_token_id": end} if end is not None else {}

    def check_fits(self, config: ModelConfig) -> None:
        """Raise ConfigError if the tokenizer has ids that the model has not."""
        if self.tokenizer and self.tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"the model has {config.vocab_size} tokens, below the {self.tokenizer.vocab_size} ids of the tokenizer;"
                " name the data that it was trained on with --data"
            )

    def write(self, folder: Path, config: ModelConfig) -> None:
        """Write the files to a folder. Raises OSError if a write fails."""
        if self.tokenizer is None:
            return
        self.tokenizer.save(folder / "tokenizer.json")
        end = self.tokenizer.token(self.tokenizer.eod)
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json holds; not that of GPT-2 only
            "bos_token": end,
            "eos_token": end,
            "unk_token": None,
            "model_max_length": config.seq_length,
            "clean_up_tokenization_spaces": False,
        }
        # The padding of a batch is masked; without an id for it, generation warns.
        generation_config = {**self.special_ids, "pad_token_id": self.tokenizer.eod}
        _write_json(folder / "tokenizer_config.json", tokenizer_config)
        _write_json(folder / "generation_config.json", generation_config)


NO_TOKENIZER = TokenizerFiles()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
