"""Tasks: the same scores at any layout, and those of a plain computation with transformers on the exported weights."""

import json
import math
import os
import random
import re
import subprocess
import sysconfig
import venv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from data.chosen_tokenizers import train_tokenizer
from data.errors import DataError
from data.tokenizer import Tokenizer
from gpt.evaluate import evaluate_model
from gpt.monitor.console import task_lines
from gpt.pretrained.weights import write_weights
from gpt.tasks import judge, load_task, load_tasks, score
from lab.faults.runs import prepare_corpus
from parallel.validation.errors import ConfigError
from tests.distributed.gpt.test_checkpoint_layouts import CONFIG, LayoutCase, build, train
from tests.end_to_end.runs import options, run
from tests.ranks import run_ranks

TEXTS = ["the cat sat on the mat and the dog sat on the log", "a man is walking on ice; he falls down"]
ENDINGS = ["falls down on ice.", "sits on the [note] mat", "is", "walks the dog"]
HELLASWAG = {"activity_label": "Ice [x] walk", "ctx_a": "The man  walks.", "ctx_b": "he [title] then"}
CHOICES = {"text": ["cat", "ice", "log"], "label": ["A", "B", "C"]}
STEM = {"stem": "Where?", "choices": [{"text": text, "label": label} for label, text in enumerate("ab")]}
FILES = {
    "hella": [HELLASWAG | {"endings": ENDINGS, "label": label} for label in (0, "1", 3)],
    "arc": [{"question": "Who sat?", "choices": CHOICES, "answerKey": "A"}, {"question": STEM, "answerKey": 1}],
    "words": [{"text": "the cat sat on the mat"}, {"text": "dog"}, {"text": "he falls down  "[:-1] + "down"}],
}
MODEL = replace(CONFIG, vocab_size=290, seq_length=32)
LAYOUTS = [LayoutCase(0), LayoutCase(0, 4), LayoutCase(3, 4), LayoutCase(3, 2, 2, is_split=True), LayoutCase(1, 1, 4)]


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 290)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / f"{name}.jsonl") for name in FILES]


def scores_of(case: LayoutCase, files: list[str], folder: Path) -> tuple[Tensor, dict[str, float]]:
    """Return the scores of the requests of all tasks, and the metrics, after a few steps; export the weights of one."""
    state, tasks = build(replace(case, model=MODEL)), load_tasks(files, tokenizer(), MODEL.seq_length, None)
    train(state, 0, 3)
    requests = [request for task in tasks for request in task.requests]
    # The last batches of both parts have no request for some of four ranks.
    scores = torch.cat([score(state.model, part, state.mesh, 2) for part in (requests[:17], requests[17:])])
    found = scores, judge(state.model, tasks, state.mesh, 3)
    if case == LAYOUTS[0]:
        write_weights(folder, MODEL, state.model.module.state_dict().items(), tokenizer())
    return found


def scored_by(model: GPT2LMHeadModel, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log-likelihood of a continuation, and whether each of its tokens is the likeliest."""
    words = tokenizer()
    before = words.encode(context) or [words.eod]
    tokens = torch.tensor(words.encode(context + continuation) if context else [*before, *words.encode(continuation)])
    tokens, num_scored = tokens[-MODEL.seq_length - 1 :], len(tokens) - len(before)
    with torch.no_grad():
        logs = model(tokens[None, :-1]).logits[0, -num_scored:].log_softmax(-1)
    targets = tokens[-num_scored:]
    return logs.gather(-1, targets[:, None]).sum().item(), bool((logs.argmax(-1) == targets).all())


def test_scores_are_those_of_transformers_and_the_same_at_any_layout(files, tmp_path):
    ((expected, metrics),) = run_ranks(1, scores_of, LAYOUTS[0], files, tmp_path)
    prompts = [
        *[("Ice walk: The man walks. He. then", ending) for ending in ("falls down on ice.", "sits on the mat")],
        *[("Ice walk: The man walks. He. then", ending) for ending in ("is", "walks the dog")],
    ] * 3
    prompts += [("Question: Who sat?\nAnswer:", name) for name in ("cat", "ice", "log")]
    prompts += [("Question: Where?\nAnswer:", name) for name in "ab"]
    prompts += [("the cat sat on the", "mat"), ("", "dog"), ("he falls down", "down")]
    model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    by_prompt = [scored_by(model, context, f" {name}") for context, name in prompts]
    torch.testing.assert_close(expected, torch.tensor(by_prompt, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    likelihoods = [likelihood for likelihood, _ in by_prompt]
    answers = [(0, 4, 0), (4, 8, 1), (8, 12, 3), (12, 15, 0), (15, 17, 1)]
    right = [
        max(range(stop - first), key=lambda n, i=first: likelihoods[i + n]) == answer for first, stop, answer in answers
    ]
    lengths = [len(name) for _, name in prompts]
    by_length = [
        max(range(stop - first), key=lambda n, i=first: likelihoods[i + n] / lengths[i + n]) == answer
        for first, stop, answer in answers
    ]
    hella, arc, greedy = sum(right[:3]) / 3, sum(right[3:]) / 2, sum(found for _, found in by_prompt[17:]) / 3
    chance = (1 / 3 + 1 / 2) / 2
    assert metrics == pytest.approx(
        {
            "task/hella/accuracy": hella,
            "task/hella/centred_accuracy": (hella - 1 / 4) / (3 / 4),
            "task/hella/accuracy_by_length": sum(by_length[:3]) / 3,
            "task/arc/accuracy": arc,
            "task/arc/centred_accuracy": (arc - chance) / (1 - chance),
            "task/arc/accuracy_by_length": sum(by_length[3:]) / 2,
            "task/words/accuracy": greedy,
            "task/words/centred_accuracy": greedy,
            "task/words/perplexity": math.exp(-sum(likelihoods[17:]) / 3),
        }
    )
    for case in LAYOUTS[1:]:
        for found, of_rank in run_ranks(case.num_ranks, scores_of, case, files, tmp_path):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            assert of_rank == pytest.approx(metrics)


def test_marks_of_wikihow_are_left_out_of_a_text_of_any_length(tmp_path):
    texts = ["a [b] c", "[[a] b]", "a [b\nc] d [e]\n[f", "] a [", "[" * 200_000, "[\n]" * 9]
    for text in texts:
        row = HELLASWAG | {"ctx_a": text, "endings": ["x"], "label": 0, "activity_label": ""}
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        (question,) = load_task(tmp_path / "a.jsonl", tokenizer(), 32).questions
        expected = text if len(text) > 99 else re.sub(r"\[.*?\]", "", text)
        assert question.context == f": {expected} He. then".replace("  ", " ")


def test_a_run_logs_the_metrics_of_its_tasks_with_a_context_as_without(files, tmp_path):
    corpus = prepare_corpus(tmp_path)
    settings = {
        "train__tasks": json.dumps(files),
        "train__task_every": 2,
        "train__task_questions": 2,
        "train__steps": 3,
        "model__seq_length": 32,
    }
    alone = run(1, corpus, tmp_path / "alone", **settings)
    with_context = run(2, corpus, tmp_path / "context", parallel__context_size=2, **settings)
    found = [{name: value for name, value in step.items() if name.startswith("task/")} for step in alone]
    assert [bool(metrics) for metrics in found] == [False, True, True]
    assert len(found[1]) == 9
    for step, metrics in zip(with_context, found, strict=True):
        assert {name: step[name] for name in metrics} == pytest.approx(metrics, rel=1e-4)  # in fp32
    accuracy = found[2]["task/hella/accuracy"]
    assert task_lines(alone[2])[0].startswith(f"hella: accuracy {accuracy:.4g}, centred accuracy ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"endings": ["a"]}', r"a.jsonl:1 is not a row of HellaSwag, ARC or LAMBADA \(KeyError 'activity_label'\)"),
        ('{"text": "a b"}\n\nbroken', "a.jsonl:3 is not a row of"),
        ('{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "E"}', "is not a row of"),
        ("[1]", "is not a row of"),
        ("", "needs questions of one format, 1 or more; it has 0 rows"),
        (None, "cannot read the task .*a.jsonl: .*No such file"),
    ],
)
def test_a_file_that_is_no_task_is_reported_with_its_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_task(tmp_path / "a.jsonl", tokenizer(), 8)
    with pytest.raises(ConfigError, match=r"need a tokenizer, and that of data\.path is missing"):
        load_tasks([str(tmp_path / "a.jsonl")], None, 8, None)


TASK = """
include: {tasks}/{path}.yaml
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{validation: {file}, test: {file}}}}}
training_split: null
"""
OF_HARNESS = {"hella": "hellaswag/hellaswag", "arc": "arc/arc_easy", "words": "lambada/lambada_openai"}
METRICS = {"accuracy": "acc,none", "accuracy_by_length": "acc_norm,none", "perplexity": "perplexity,none"}


def random_rows(num_rows: int) -> dict[str, list[dict]]:
    """Return rows of each format, in which the files of the hub have the same types."""
    words, choose = [word for text in TEXTS for word in text.split()], random.Random(1)

    def text(num_words: int) -> str:
        return " ".join(choose.choices(words, k=choose.randint(1, num_words)))

    rows: dict[str, list[dict]] = {name: [] for name in OF_HARNESS}
    for _ in range(num_rows):
        endings = [text(9) for _ in range(4)]
        rows["hella"].append({**HELLASWAG, "ctx_a": text(30), "endings": endings, "label": str(choose.randrange(4))})
        choices = {"text": endings[:3], "label": ["A", "B", "C"]}
        rows["arc"].append({"question": text(9), "choices": choices, "answerKey": choose.choice("ABC")})
        rows["words"].append({"text": text(40) + " mat"})
    return rows


@pytest.mark.full
def test_metrics_of_exported_weights_are_those_of_lm_evaluation_harness(tmp_path):
    """It is installed for this test only: its requirements are many, and the project needs none of them."""
    venv.create(tmp_path / "venv", with_pip=True)
    (installed,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    (installed / "ours.pth").write_text(sysconfig.get_path("purelib"))  # torch and transformers
    install = ["-m", "pip", "install", "--quiet", "lm_eval", "accelerate", "peft"]
    subprocess.run([tmp_path / "venv/bin/python", *install], check=True)

    files = {name: tmp_path / f"{name}.jsonl" for name in OF_HARNESS}
    for name, rows in random_rows(40).items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks = {"tasks": installed / "lm_eval/tasks", "path": OF_HARNESS[name]}
        (tmp_path / f"{name}.yaml").write_text(TASK.format(**tasks, name=name, file=files[name]))
    weights = tmp_path / "weights"
    run_ranks(1, scores_of, LAYOUTS[0], [str(files["hella"])], weights)
    model = f"pretrained={weights},dtype=float32"
    arguments = ["--model", "hf", "--model_args", model, "--tasks", ",".join(files), "--device", "cpu"]
    arguments += ["--include_path", tmp_path, "--batch_size", "4", "--output_path", tmp_path / "results"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    subprocess.run([tmp_path / "venv/bin/lm_eval", *arguments], env=environment, check=True)
    (file,) = (tmp_path / "results").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]

    shape = {f"model__{name}": getattr(MODEL, name) for name in ("hidden_size", "seq_length", "vocab_size")}
    own = ["--tasks", *map(str, files.values()), "--weights", str(weights), "--tokenizer", str(weights)]
    command = [*own, *options(tmp_path / "none", tmp_path / "run", **shape)]
    (ours, _) = run_ranks(2, evaluate_model, command, init_process_group=False)
    compared = {f"task/{name}/{metric}" for name in files for metric in METRICS} & set(ours)
    assert len(compared) == 6
    for name in compared:
        _, task, metric = name.split("/")
        assert ours[name] == pytest.approx(theirs[task][METRICS[metric]], rel=1e-4), name  # perplexities, in fp32
    assert len({ours[name] for name in compared}) > 3, "the scores are those of a model that prefers something"
