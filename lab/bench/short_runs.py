"""Short runs of small models on one CPU, for comparisons of settings: all see the same batches in the same order."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.indexed import IndexedDataset
from gpt.builder.train_state import TrainState, build
from gpt.settings.parser import parse_settings
from gpt.settings.schedule import learning_rate
from gpt.train_step import evaluate, train_step
from parallel.mesh import Mesh

Curve = list[tuple[int, float]]  # (step, validation loss)
Runs = Iterable[tuple[str, float, Callable[[], Curve]]]  # (name, learning rate, function that trains)

NUM_VALIDATION_BATCHES = 24
VALIDATION_SHARE = 0.05  # of the text, at its end


def options_parser(doc: str, data: str, num_steps: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all comparisons have; `data` describes their tokens."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument("--output", type=Path, required=True, help="prefix of OUTPUT.json and OUTPUT.png")
    parser.add_argument("--steps", type=int, default=num_steps)
    return parser


def complete(path: Path, runs: Runs, kept: Callable[[Curve], Any]) -> dict[str, dict[str, Any]]:
    """Return what is `kept` of each run's curve, by name and learning rate.

    Runs that the file has are not repeated; the others are added to it as they end.
    """
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name, rate, train_it in runs:
        of_rate = found.setdefault(name, {})
        if str(rate) not in of_rate:
            curve = train_it()
            of_rate[str(rate)] = kept(curve)
            print(name, rate, f"{curve[-1][1]:.4f}", flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def tokens_of(prefix: str) -> Tensor:
    """Return all tokens of token files, one document after the other, in int64."""
    dataset = IndexedDataset(prefix)
    return torch.from_numpy(np.concatenate([dataset[number] for number in range(len(dataset))]).astype(np.int64))


def train(
    arguments: list[str],
    tokens: Tensor,
    num_steps: int,
    evaluate_every: int | None = None,
    change: Callable[[TrainState], None] = lambda _state: None,
    seed: int = 0,
    num_validation_batches: int = NUM_VALIDATION_BATCHES,
) -> Iterator[tuple[int, float]]:
    """Yield (step, validation loss) of a model after every so many steps of its training, and after the last one.

    `arguments` are those of `pretrain_gpt.py`, beside the data; `change` is called with what is built of them. The seed
    is that of the batches.
    """
    config = parse_settings(["--data.path=none", *arguments])
    state = build(config, Mesh.create(1), torch.device("cpu"))
    change(state)
    num_training = int(len(tokens) * (1 - VALIDATION_SHARE))
    random = torch.Generator().manual_seed(seed)
    size = config.train.micro_batch_size, config.model.seq_length
    training = [places(num_training, size, random) for _ in range(num_steps)]
    held_out = [num_training + places(len(tokens) - num_training, size, random) for _ in range(num_validation_batches)]
    for step, place in enumerate(training, 1):
        state.set_learning_rate(learning_rate(config.schedule, config.optimizer.lr, step - 1, num_steps))
        train_step(state.model, state.optimizer, [tokens[place]], state.mesh)
        if step == num_steps or (evaluate_every and step % evaluate_every == 0):
            yield step, evaluate(state.model, (tokens[place] for place in held_out), state.mesh)


def places(num_tokens: int, size: tuple[int, int], random: torch.Generator) -> Tensor:
    """Return the places of a batch's tokens, (sequences, seq_length + 1), each sequence at random."""
    num_sequences, seq_length = size
    starts = torch.randint(num_tokens - seq_length, (num_sequences, 1), generator=random)
    return starts + torch.arange(seq_length + 1)
