"""The files beside exported weights by which transformers opens the tokenizer of the training data.

tokenizer.json, tokenizer_config.json, generation_config.json
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.blend import parse_path
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_path
from gpt.shape.config import ModelConfig
from parallel.errors import ConfigError

logger = logging.getLogger(__name__)


def tokenizer_of_data(data: Mapping[str, Any]) -> Tokenizer | None:
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
        return None
    return load_tokenizer(prefix)


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return the ids for config.json: the end of a document ends a text, and begins one, as in GPT-2."""
    end = tokenizer.eod if tokenizer else None
    return {"bos_token_id": end, "eos_token_id": end}


def check_fits(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Raise ConfigError if the tokenizer has ids that the model has not."""
    if tokenizer and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the model has {config.vocab_size} tokens, below the {tokenizer.vocab_size} ids of the tokenizer; name "
            "the data that it was trained on with --data"
        )


def write_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Write the files to a folder. Raises OSError if a write fails."""
    tokenizer.save(folder / "tokenizer.json")
    end = tokenizer.token(tokenizer.eod)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json holds; not that of GPT-2 only
        "bos_token": end,
        "eos_token": end,
        "unk_token": None,
        "model_max_length": config.seq_length,
        "clean_up_tokenization_spaces": False,
    }
    # The padding of a batch is masked; without an id for it, generation warns.
    generation_config = {**special_ids(tokenizer), "pad_token_id": tokenizer.eod}
    for name, content in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation_config)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
