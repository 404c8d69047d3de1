"""Measures the perplexity of a text per word, or the accuracy in tasks, with a checkpoint or exported weights.

    torchrun --nproc_per_node=2 -m gpt.evaluate --source wiki.test.tokens --wikitext --config runs/x/config.yaml
    torchrun --nproc_per_node=2 -m gpt.evaluate --tasks hellaswag.jsonl --config runs/x/config.yaml

gpt/tasks.py has the tasks. A text is read in overlapping windows, which are divided among all ranks:

    text      <end of text> t1 t2 t3 ......................... tn     each of t1 to tn is predicted once
    window 0  |--------------|                                        all its predictions are scored
    window 1      |..........|---|                                    the last `stride` are scored, the rest is context
    window 2          |..........|---|

Negative log-likelihoods are summed and divided by the number of words of the original text, not of tokens, so that
perplexities of different vocabularies can be compared, as is customary for WikiText-103.
"""

import argparse
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.blend import parse_path
from data.chosen_tokenizers import named_tokenizer
from data.errors import DataError
from data.sources import Source, text_of
from data.tokenizer import Tokenizer, load_tokenizer
from gpt.builder.host_memory import check_host_memory
from gpt.builder.train_state import TrainState, build, build_mesh, start_options
from gpt.checkpoint.checkpoint import load
from gpt.checkpoint.folder import find
from gpt.checkpoint.layout import check_tokenizer, read_run
from gpt.monitor.console import RunConsole, start_logging, task_lines
from gpt.pretrained.tokenizer_files import check_same_tokenizer
from gpt.run_folder.files import CHECKPOINTS
from gpt.settings.data import check_names
from gpt.settings.option_names import messages_in_option_names
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.tasks import Request, judge, load_tasks, perplexity_of, score
from parallel.validation.errors import ConfigError
from parallel.validation.paths import expanded
from parallel.world import World, exit_as_rank, start_world
from zero.checkpoint.layout_file import writer_of

# These undo WikiText's own tokenization, as GPT-2's authors and Megatron-LM do before they evaluate.
WIKITEXT_SPACES = (
    (r" @([-,.])@ ", r"\1"),  # 3 @,@ 000 -> 3,000
    (r" ([.,:;!?%)\]}])", r"\1"),
    (r"([(\[{$]) ", r"\1"),
    (r' " ([^"]*) " ', r' "\1" '),
    (r' " ([^"]*) "', r' "\1"'),
    (r" '(s|re|ve|ll|d|m|t)\b", r"'\1"),
    (r"(s) ' ", r"\1' "),
    (r"(?<!=)(=+) ([^=\n]+?) (=+) \n", r"\1 \2 \3\n"),
    (r" \n", r"\n"),
)


@dataclass(frozen=True)
class Score:
    """The likelihood of a text."""

    nll: float  # negative log-likelihood, natural logarithm, summed over all tokens
    num_tokens: int
    num_words: int

    @property
    def perplexity(self) -> float:
        """The perplexity per word."""
        return perplexity_of(self.nll / self.num_words)

    @property
    def token_perplexity(self) -> float:
        """The perplexity per token."""
        return perplexity_of(self.nll / self.num_tokens)


def windows(tokens: list[int], seq_length: int, stride: int) -> list[Request]:
    """Return requests for windows of the text, which together score each token but the first once.

    After the first window, each prediction has at least `seq_length - stride` tokens of context.
    """
    ids = np.asarray(tokens, dtype=np.int64)  # whose slices are views
    found: list[Request] = []
    scored = 0
    while scored < len(tokens) - 1:
        stop = min(len(tokens) - 1, scored + (stride if scored else seq_length))
        found.append(Request(ids[max(0, stop - seq_length) : stop + 1], stop - scored))
        scored = stop
    return found


def read_text(source: Source) -> str:
    """Return all documents, each beginning on a new line. Raises DataError if they have no words."""
    texts = [text_of(document, source.text_key) for document in source.documents()]
    joined = "".join(text if text.endswith("\n") else text + "\n" for text in texts if text)
    if not joined.split():
        raise DataError(f"--source {' '.join(source.names)} has 0 words, 1 or more are needed; give another")
    return joined


def undo_wikitext(text: str) -> str:
    """Return the text without WikiText's extra spaces."""
    for pattern, replacement in WIKITEXT_SPACES:
        text = re.sub(pattern, replacement, text)
    return text


def find_tokenizer(name: str | None, data_path: str | list[str], model_vocab_size: int) -> Tokenizer:
    """Return the tokenizer `name`, or that of the training data if `name` is None.

    Raises ConfigError if its vocabulary is larger than the model's.
    """
    _, prefixes = parse_path(data_path)
    tokenizer = named_tokenizer(name) if name else load_tokenizer(prefixes[0])
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"model.vocab_size={model_vocab_size} is below the {tokenizer.vocab_size} ids of the tokenizer; "
            "give the one that the model was trained with as --tokenizer"
        )
    return tokenizer


def load_model(settings: Settings, weights: str | None, world: World) -> tuple[TrainState, str]:
    """Return the model, and the folder that its weights were read from.

    That is the folder `weights`, of exported weights, or if it is None the checkpoint that `checkpoint.resume` selects.
    Each rank computes whole sequences. Raises ConfigError if there is no such checkpoint.
    """
    settings = replace(settings, parallel=replace(settings.parallel, context_size=1))
    mesh = build_mesh(settings, world)
    check_host_memory(settings, mesh, world)
    if weights:
        settings = replace(settings, train=replace(settings.train, initial_weights=weights))
        return build(settings, mesh, world.device), weights
    folder = Path(settings.run.dir) / CHECKPOINTS
    saved = find(folder, settings.checkpoint.resume)
    if saved is None:
        raise ConfigError(
            f"{folder} holds no checkpoint; give another --run.dir, or exported weights with --weights FOLDER"
        )
    state = build(settings.without_initial_weights(), mesh, world.device)
    load(saved, state)
    return state, str(saved)


def _check_tokenizer(origin: Path, is_exported: bool, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the model was trained with another tokenizer; warn if that is not known."""
    if is_exported:
        check_same_tokenizer(origin, tokenizer)
    elif not writer_of(origin):
        saved = read_run(origin).layout["data"]
        check_tokenizer(origin, saved, tokenizer.vocabulary_hash, "give that one as --tokenizer")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not settings."""
    parser = argparse.ArgumentParser(prog="python -m gpt.evaluate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    judged_by = parser.add_mutually_exclusive_group(required=True)
    judged_by.add_argument("--source", nargs="+", help="text files, or the hub name of a dataset")
    judged_by.add_argument("--tasks", nargs="+", help="files of questions of HellaSwag, ARC or LAMBADA")
    add("--subset", help="the configuration of a hub dataset, such as wikitext-103-v1")
    add("--split", default="test", help="the split of a dataset (default: %(default)s)")
    add("--text_key", default="text", help="the key of the text in JSON lines, or its column (default: %(default)s)")
    add(
        "--stride",
        type=int,
        help="predictions scored by each window after the first; default: all, so that windows do not overlap",
    )
    add("--tokenizer", help="a file, folder or hub name; default: that of data.path")
    add("--weights", type=expanded, help="folder of exported weights; default: the newest checkpoint in run.dir")
    add(
        "--wikitext",
        action="store_true",
        help="undo WikiText's extra spaces, and count ends of lines as words",
    )
    return parser


@messages_in_option_names()
def evaluate_model(arguments: list[str]) -> Score | dict[str, float]:
    """Print and return the score of the text, or the metrics of the tasks, that the command line names.

    All ranks call it.

    Raises ConfigError or DataError.
    """
    own, others = _parser().parse_known_args(arguments)
    settings = parse_settings(others)
    check_names("--tasks", [Path(path).stem for path in own.tasks or ()])
    if own.stride is not None and not 1 <= own.stride <= settings.model.seq_length:
        raise ConfigError(
            f"--stride={own.stride} is not between 1 and model.seq_length={settings.model.seq_length}; "
            "choose a number in that range"
        )
    text = read_text(Source(own.source, own.text_key, own.subset, own.split)) if own.source else ""
    world = start_world(start_options(settings))
    start_logging(world.is_first)
    state, origin = load_model(settings, own.weights, world)
    tokenizer = find_tokenizer(own.tokenizer, settings.data.path, settings.model.vocab_size)
    _check_tokenizer(Path(origin), is_exported=bool(own.weights), tokenizer=tokenizer)
    console, batch_size = RunConsole(is_quiet=not world.is_first), settings.train.micro_batch_size
    if own.tasks:
        tasks = load_tasks(own.tasks, tokenizer, settings.model.seq_length, settings.train.task_questions)
        metrics = judge(state.model, tasks, state.mesh, batch_size)
        console.say("\n".join([origin, *task_lines(metrics)]))
        return metrics
    num_words = len(text.split()) + (text.count("\n") if own.wikitext else 0)
    ids = [tokenizer.start, *tokenizer.encode(undo_wikitext(text) if own.wikitext else text)]
    seq_length = settings.model.seq_length
    scores = score(state.model, windows(ids, seq_length, own.stride or seq_length), state.mesh, batch_size)
    found = Score(-scores[:, 0].sum().item(), len(ids) - 1, num_words)
    console.say(
        f"{origin}\nperplexity {found.perplexity:,.6g} per word, {found.token_perplexity:,.6g} per token "
        f"({found.num_words:,} words, {found.num_tokens:,} tokens)"
    )
    return found


if __name__ == "__main__":
    with exit_as_rank(DataError):
        evaluate_model(sys.argv[1:])
