"""Tiny runs of one rank in the process of the test."""

from pathlib import Path

import numpy as np
import torch

from data.chosen_tokenizers import character_tokenizer
from data.sidecar import Sidecar
from data.staging import IndexedWriter
from data.tokenizer import tokenizer_path
from gpt.builder.train_state import build, build_mesh
from gpt.corpus import Corpus
from gpt.monitor.console import RunConsole
from gpt.monitor.watch import Watch
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.trainer import Trainer
from parallel.world import World
from tests.end_to_end.runs import options

SEQ_LENGTH, NUM_DOCUMENTS = 8, 60


def write_text(prefix: Path, words: str = "green bottles on the wall") -> Path:
    """Write some thousand tokens, one for each character, with their tokenizer."""
    texts = [f"{number} {words}; " * (1 + number % 5) for number in range(NUM_DOCUMENTS)]
    tokenizer = character_tokenizer(texts)
    documents = [[*ids, tokenizer.eod] for ids in tokenizer.encode_batch(texts)]
    tokens = np.array([token for document in documents for token in document])
    with IndexedWriter(prefix, np.dtype("u2")) as writer:
        writer.add(tokens, np.array([len(document) for document in documents]))
    tokenizer.save(tokenizer_path(prefix))
    Sidecar(tokenizer.vocab_size, tokenizer.eod, "characters", NUM_DOCUMENTS, len(tokens), ["text"]).save(prefix)
    return prefix


def tiny_settings(prefix: Path, folder: Path, **settings: object) -> Settings:
    """Return the settings of a run that is still smaller than that of `options`; names have `__` for the dot."""
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": SEQ_LENGTH, "vocab_size": 64}
    smaller = {f"model__{name}": value for name, value in model.items()} | {
        "data__split": "[0.6, 0.4, 0]",
        "train__global_batch_size": 4,
    }
    return parse_settings(options(prefix, folder, **(smaller | settings)))


def make_trainer(prefix: Path, folder: Path, **settings: object) -> Trainer:
    """Return the trainer of a run with `tiny_settings`."""
    parsed, world = tiny_settings(prefix, folder, **settings), World(0, 1, 0, 1, torch.device("cpu"))
    mesh = build_mesh(parsed, world)
    corpus = Corpus.open(parsed.data, parsed.model, parsed.train, mesh, world)
    state, watch = build(parsed, mesh, world.device), Watch(parsed, world, mesh.log)
    return Trainer(parsed, world, state, corpus, RunConsole(is_quiet=False), watch)
