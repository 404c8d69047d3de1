"""Tasks that judge a model: questions with several answers and last words of texts, from local files of JSON lines.

    HellaSwag   activity_label, ctx_a, ctx_b, endings, label     the likeliest ending
    ARC         question, choices, answerKey                     the likeliest answer; as on the hub, or as published
    LAMBADA     text                                             the last word, predicted token by token

Prompts and metrics are those of lm-evaluation-harness (hellaswag, arc_easy and arc_challenge, lambada_openai). Each
answer is a sequence, context and continuation; all sequences of all tasks are divided among the ranks.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.tokenizer import Tokenizer
from gpt.generate import attention_of_any_length, evaluation
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.validation.files import read_limited
from zero.data_parallel import ZeroDataParallel

MAX_FILE_BYTES = 128 << 20  # of the questions of a task


@dataclass(frozen=True)
class Question:
    """A context and its possible continuations; `answer` is the number of the right one. A single one is predicted."""

    context: str
    choices: list[str]
    answer: int


@dataclass(frozen=True)
class Request:
    """A sequence whose last `num_scored` tokens are scored."""

    tokens: Sequence[int] | np.ndarray
    num_scored: int


@dataclass(frozen=True)
class Task:
    """The questions of a file, and a request for each choice of each of them."""

    name: str
    questions: list[Question]
    requests: list[Request]

    def metrics(self, scores: Tensor) -> dict[str, float]:
        """Return the metrics for what `score` returns for the requests."""
        of_questions = scores.split([len(question.choices) for question in self.questions])
        if len(self.questions[0].choices) == 1:
            likelihoods, is_greedy = scores.T.tolist()
            accuracy = fmean(is_greedy)
            perplexity = perplexity_of(-fmean(likelihoods))
            return {"accuracy": accuracy, "centred_accuracy": accuracy, "perplexity": perplexity}
        right, right_by_length, chances = [], [], []
        for question, found in zip(self.questions, of_questions, strict=True):
            likelihoods = found[:, 0]
            lengths = likelihoods.new_tensor([len(choice) for choice in question.choices])
            right.append(int(likelihoods.argmax()) == question.answer)
            right_by_length.append(int((likelihoods / lengths).argmax()) == question.answer)
            chances.append(1 / len(question.choices))
        accuracy, chance = fmean(right), fmean(chances)
        return {
            "accuracy": accuracy,
            "centred_accuracy": (accuracy - chance) / (1 - chance),
            "accuracy_by_length": fmean(right_by_length),
        }


def perplexity_of(nll: float) -> float:
    """Return the perplexity of a mean negative log-likelihood; infinite if it is too large."""
    return float(torch.tensor(nll, dtype=torch.float64).exp())


def _hellaswag(row: dict[str, Any]) -> Question:
    def without_marks(line: str) -> str:
        """Return a line without what is in brackets; after the last "]" there is none, and the search would be long."""
        before, bracket, after = line.rpartition("]")
        return re.sub(r"\[.*?\]", "", before + bracket) + after

    def cleaned(text: str) -> str:
        """Return the text without the marks of WikiHow."""
        lines = text.strip().replace(" [title]", ". ").split("\n")
        return "\n".join(map(without_marks, lines)).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Question(cleaned(context), [cleaned(ending) for ending in row["endings"]], int(row["label"]))


def _arc(row: dict[str, Any]) -> Question:
    question: Any = row["question"]
    choices: Any = row.get("choices")
    if isinstance(question, dict):  # as published
        question, choices = question["stem"], question["choices"]
        choices = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    return Question(f"Question: {question}\nAnswer:", choices["text"], choices["label"].index(row["answerKey"]))


def _lambada(row: dict[str, Any]) -> Question:
    context, _, word = row["text"].rpartition(" ")
    return Question(context, [word], 0)


FORMATS: dict[str, Callable[[dict[str, Any]], Question]] = {  # by a key that only rows of the format have
    "endings": _hellaswag,
    "answerKey": _arc,
    "text": _lambada,
}


def load_task(path: Path, tokenizer: Tokenizer, seq_length: int, num_questions: int | None = None) -> Task:
    """Return the task of a file, by its name; `num_questions`: the first ones only.

    Raises DataError if the file cannot be read as one of FORMATS.
    """
    try:
        text = read_limited(path, MAX_FILE_BYTES).decode("utf-8")
        lines = text.split("\n")  # other separators may stand in a text
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot read the task {path}: {error}; correct train.tasks") from None
    questions: list[Question] = []
    requests: list[Request] = []
    for number, line in islice(((number, line) for number, line in enumerate(lines, 1) if line.strip()), num_questions):
        question = _question(f"{path}:{number}", line)
        questions.append(question)
        try:
            requests += [_request(tokenizer, seq_length, question.context, f" {choice}") for choice in question.choices]
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from None
    if len({len(question.choices) == 1 for question in questions}) != 1:
        raise DataError(f"the task {path} needs questions of one format, 1 or more; it has {len(questions)} rows")
    return Task(path.stem, questions, requests)


def load_tasks(
    paths: Sequence[str], tokenizer: Tokenizer | None, seq_length: int, num_questions: int | None
) -> list[Task]:
    """Return the tasks of files. Raises ConfigError or DataError if they cannot be asked."""
    if paths and tokenizer is None:
        raise ConfigError(
            f"train.tasks={list(paths)} need a tokenizer, and that of data.path is missing; prepare the data with "
            "python -m data.prepare, or choose train.tasks=[]"
        )
    return [load_task(Path(path), tokenizer, seq_length, num_questions) for path in paths if tokenizer]


def _question(place: str, line: str) -> Question:
    try:
        row = json.loads(line)
        parse = next(parse for key, parse in FORMATS.items() if key in row)
        question = parse(row)
        if not all(question.choices) or not 0 <= question.answer < len(question.choices):
            raise ValueError(f"answer {question.answer} of {len(question.choices)}")
        return question
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise DataError(
            f"{place} is not a row of HellaSwag, ARC or LAMBADA ({type(error).__name__} {error}); correct it"
        ) from None


def _request(tokenizer: Tokenizer, seq_length: int, context: str, continuation: str) -> Request:
    """Return the request of a continuation, whose tokens are those that the whole text has more than the context."""
    stripped = context.rstrip()
    whole = [*tokenizer.beginning, *tokenizer.encode(context + continuation)]
    before = [*tokenizer.beginning, *tokenizer.encode(stripped)] if stripped else []
    num_scored = len(whole) - max(len(before), len(tokenizer.beginning))
    tokens = whole if before else [tokenizer.start, *whole[len(tokenizer.beginning) :]]
    kept = tokens[-(seq_length + 1) :]
    return Request(kept, min(max(num_scored, 0), len(kept) - 1))  # 0 if the continuation adds no token


@torch.no_grad()
def score(
    model: ZeroDataParallel,
    requests: Sequence[Request],
    mesh: Mesh,
    micro_batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return (log-likelihood, 1 if each scored token is the likeliest else 0) of each request, float64 on the CPU.

    All ranks call it, and get all results. The longest sequences come first, so that a batch has about one length.
    """
    device = next(model.module.parameters()).device
    results = torch.zeros(len(requests), 2, dtype=torch.float64, device=device)
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
    at_once = micro_batch_size * mesh.num_batch_ranks
    with evaluation(model), attention_of_any_length(), mesh.log.during("evaluation"):
        for first in range(0, len(order), at_once):
            numbers = order[first : first + at_once]
            # Ranks without a request compute the first one too: they may have to unshard parameters together.
            own = numbers[mesh.batch_rank :: mesh.num_batch_ranks] or numbers[:1]
            is_counted = mesh.batch_rank < len(numbers) and mesh.context.rank == 0
            batch = [requests[number] for number in own]
            read = torch.zeros(len(batch), len(requests[numbers[0]].tokens) - 1, dtype=torch.int64)
            for row, request in zip(read, batch, strict=True):
                row[: len(request.tokens) - 1] = torch.tensor(request.tokens[:-1])
            for number, request, logits in zip(own, batch, model(read.to(device)), strict=True):
                if is_counted:
                    results[number] = _score(request, logits)
            on_batch()
    mesh.data.all_reduce(results, out=results).wait()
    return results.cpu()


def _score(request: Request, logits: Tensor) -> Tensor:
    stop = len(request.tokens) - 1
    scored = logits[stop - request.num_scored : stop]
    scored = scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)
    targets = torch.tensor(request.tokens[stop + 1 - request.num_scored :], device=logits.device, dtype=torch.int64)
    likelihood = scored.gather(-1, targets[:, None]).double().sum()
    return torch.stack([likelihood, (scored.argmax(-1) == targets).all().double()])


def judge(
    model: ZeroDataParallel,
    tasks: Sequence[Task],
    mesh: Mesh,
    micro_batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the metrics of the tasks, such as task/hellaswag/accuracy. All ranks call it."""
    found = score(model, [request for task in tasks for request in task.requests], mesh, micro_batch_size, on_batch)
    of_tasks = found.split([len(task.requests) for task in tasks])
    return {
        f"task/{task.name}/{name}": value
        for task, scores in zip(tasks, of_tasks, strict=True)
        for name, value in task.metrics(scores).items()
    }
