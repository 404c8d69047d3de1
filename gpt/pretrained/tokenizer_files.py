"""The files beside exported weights by which transformers opens the tokenizer.

Weights that were trained from initial ones have the files of that folder, with its special tokens and chat template.
Others have the tokenizer of the training data: tokenizer.json, tokenizer_config.json, generation_config.json.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.blend import parse_path
from data.chosen_tokenizers import configuration_of, first_token
from data.tokenizer import Tokenizer, load_tokenizer, read_backend, tokenizer_path
from gpt.shape.config import ModelConfig
from parallel.validation.errors import ConfigError
from zero.checkpoint.schema import shown

FILES = (  # of a tokenizer in a folder of transformers
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json

logger = logging.getLogger(__name__)


def has_tokenizer(folder: Path | None) -> bool:
    """Return whether a folder of weights has the files of a tokenizer."""
    return folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def check_same_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if an id of the data is another token in a folder of weights; warn if either has no tokenizer.

    Each may have tokens that the other lacks, such as those of a chat.
    """
    path = folder / "tokenizer.json"
    if tokenizer is None or not path.is_file():
        missing = path if tokenizer else "the tokenizer of data.path"
        logger.warning("%s is not there: that the data has the tokenizer of the weights is not checked", missing)
        return
    backend = read_backend(path)
    theirs = {id: token for token, id in backend.get_vocab(with_added_tokens=True).items()}
    for token, id in tokenizer.vocabulary.items():
        if theirs.get(id, token) != token:
            raise ConfigError(
                f"{folder} has another tokenizer than the data: its id {id} is {shown(theirs[id])}, and {shown(token)} "
                f"in the data; prepare that with --tokenizer {folder}, or choose other weights"
            )
    if (first := first_token(backend, configuration_of(folder))) != tokenizer.bos:
        logger.warning(
            "documents of the data begin with %s, and the tokenizer of %s, which exports have, puts %s before a text; "
            "prepare the data without --bos_token",
            *(shown(tokenizer.bos), folder, shown(first)),
        )


def copy_tokenizer(folder: Path, output: Path) -> None:
    """Copy the files of a tokenizer from a folder of weights. Raises OSError if a write fails."""
    for path in (folder / name for name in FILES):
        if path.is_file():
            shutil.copyfile(path, output / path.name)


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


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids for config.json. If nothing begins documents, their end begins a text too, as in GPT-2."""
    return {"bos_token_id": tokenizer.start, "eos_token_id": tokenizer.eod}


def check_fits(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Raise ConfigError if the tokenizer has ids that the model has not."""
    if tokenizer and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the model has {config.vocab_size} tokens, below the {tokenizer.vocab_size} ids of the tokenizer; name "
            "the data that it was trained on with --data"
        )


def write_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig) -> None:
    """Write the files to a folder. Raises OSError if a write fails."""
    (folder / "tokenizer.json").write_text(tokenizer.text_for_others, encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # whatever tokenizer.json holds; not that of GPT-2 only
        "bos_token": tokenizer.token(tokenizer.start),
        "eos_token": tokenizer.token(tokenizer.eod),
        "unk_token": None,
        "model_max_length": config.seq_length,
        "clean_up_tokenization_spaces": False,
    }
    # The padding of a batch is masked; without an id for it, generation warns.
    generation_config = {**special_ids(tokenizer), "pad_token_id": tokenizer.eod}
    for name, content in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation_config)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
