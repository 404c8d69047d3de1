"""Perplexity of a text on several ranks, against transformers in one process, one prediction at a time."""

import math
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from data.chosen_tokenizers import character_tokenizer
from data.tokenizer import load_tokenizer
from gpt.evaluate import Score, evaluate_model, undo_wikitext, windows
from lab.faults.runs import prepare_corpus
from parallel.validation.errors import ConfigError
from tests.end_to_end.runs import TINY_MODEL, options, run_on_rank
from tests.ranks import run_ranks

WEIGHTS = "weights/step-00000003"
SEQ_LENGTH = TINY_MODEL["seq_length"]
TEXT = "ten green bottles hanging on the wall;\nand if one green bottle should accidentally fall\n" * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, a run that has saved a checkpoint and its weights, and a text."""
    folder = tmp_path_factory.mktemp("evaluated")
    corpus = prepare_corpus(folder)
    settings = {"zero__stage": 3, "train__steps": 3, "checkpoint__every": 3, "checkpoint__weights": True}
    arguments = options(corpus, folder / "run", **settings)
    run_ranks(2, run_on_rank, arguments, init_process_group=False)
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments_of(folder: Path, *own: str, stage: int = 3, tensor_size: int = 1) -> list[str]:
    settings = {"zero__stage": stage, "parallel__tensor_size": tensor_size}
    return ["--source", str(folder / "text.txt"), *own, *options(folder / "corpus", folder / "run", **settings)]


def scored_by_transformers(folder: Path, stride: int) -> float:
    tokenizer = load_tokenizer(folder / "corpus")
    tokens = torch.tensor([tokenizer.eod, *tokenizer.encode(TEXT)])
    model, total = GPT2LMHeadModel.from_pretrained(folder / "run" / WEIGHTS).eval(), 0.0
    for prediction in range(len(tokens) - 1):
        windows_before = max(0, math.ceil((prediction + 1 - SEQ_LENGTH) / stride))
        stop = min(len(tokens) - 1, SEQ_LENGTH + windows_before * stride)
        with torch.no_grad():
            logits = model(tokens[None, max(0, stop - SEQ_LENGTH) : prediction + 1]).logits[0, -1]
        total -= logits.double().log_softmax(-1)[tokens[prediction + 1]].item()
    return total


@pytest.mark.parametrize(("is_exported", "stride", "stage", "tensor_size"), [(False, 5, 3, 1), (True, 16, 1, 2)])
def test_ranks_find_the_perplexity_of_one_process(trained, is_exported, stride, stage, tensor_size):
    own = [f"--stride={stride}"] + [f"--weights={trained}/run/{WEIGHTS}"] * is_exported
    arguments = arguments_of(trained, *own, stage=stage, tensor_size=tensor_size)
    found = run_ranks(2, evaluate_model, arguments, init_process_group=False)
    expected = scored_by_transformers(trained, stride)
    num_tokens = len(load_tokenizer(trained / "corpus").encode(TEXT))
    assert found == [Score(pytest.approx(expected, rel=1e-5), num_tokens, len(TEXT.split()))] * 2
    assert found[0].perplexity == pytest.approx(math.exp(expected / len(TEXT.split())), rel=1e-4)
    assert found[0].token_perplexity == pytest.approx(math.exp(expected / num_tokens), rel=1e-4)


def test_a_text_of_few_words_has_an_infinite_perplexity_per_word():
    found = Score(nll=2000.0, num_tokens=500, num_words=1)
    assert found.perplexity == math.inf
    assert found.token_perplexity == pytest.approx(math.exp(4), rel=1e-12)


def test_every_prediction_is_scored_once_with_enough_context():
    for num_predictions in (1, 15, 16, 17, 40, 41):
        for stride in (1, 5, 16):
            found = windows(list(range(num_predictions + 1)), 16, stride)
            scored = [token for window in found for token in window.tokens[-window.num_scored :]]
            assert scored == list(range(1, num_predictions + 1))
            assert {len(window.tokens) for window in found} == {min(16, num_predictions) + 1}
            assert all(len(window.tokens) - 1 - window.num_scored >= 16 - stride for window in found[1:])


def test_wikitexts_spaces_are_undone_and_its_line_ends_count_as_words(trained, tmp_path):
    text = ' \n = Robert = \n \n It cost $ 3 @,@ 000 ( 1 @.@ 5 % ) , a well @-@ known play \'s " price " . \n'
    assert undo_wikitext(text) == '\n = Robert =\n\n It cost $3,000 (1.5%), a well-known play\'s "price".\n'
    (tmp_path / "wiki").write_text(text)
    arguments = ["--source", str(tmp_path / "wiki"), "--wikitext", *arguments_of(trained)[2:]]
    (found,) = run_ranks(1, evaluate_model, arguments, init_process_group=False)
    assert found.num_words == len(text.split()) + 4


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["--stride=17"], "--stride=17 is not between 1 and model.seq_length=16"),
        (["--run.dir=nowhere"], "nowhere/checkpoints holds no checkpoint; give another --run.dir"),
        (["--tokenizer=other.json"], "was trained with another tokenizer: .*; give that one as --tokenizer"),
        (["--tasks", "a/test.jsonl", "b/test.jsonl"], "--tasks has 2 entries of 1 names, test, test"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(trained, tmp_path, monkeypatch, own, message):
    monkeypatch.chdir(tmp_path)
    character_tokenizer([TEXT]).save("other.json")
    with pytest.raises(ConfigError, match=message):
        evaluate_model([*arguments_of(trained)[2 * ("--tasks" in own) :], *own])
