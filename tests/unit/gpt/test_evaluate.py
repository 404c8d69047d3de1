"""The evaluation of a text: its documents, its windows over ranks, and the likelihood of its tokens."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.errors import DataError
from data.sources import Source
from data.tokenizer import load_tokenizer
from gpt.evaluate import Score, Window, batches, find_tokenizer, negative_log_likelihood, read_text, windows
from parallel.errors import ConfigError
from parallel.mesh import Axis
from tests.unit.gpt.runs_in_process import write_text


@pytest.mark.parametrize(
    ("num_windows", "num_ranks", "micro_batch_size", "num_batches"),
    [(1, 1, 1, 1), (1, 4, 3, 1), (7, 2, 2, 2), (8, 2, 2, 2), (9, 2, 2, 3), (5, 5, 1, 1)],
)
def test_ranks_have_as_many_batches_and_score_each_window_once(
    num_windows: int, num_ranks: int, micro_batch_size: int, num_batches: int
):
    of_all = [Window(range(number, number + 4), range(number, number + 1)) for number in range(num_windows)]
    scored = []
    for rank in range(num_ranks):
        axis = replace(Axis.trivial("data"), size=num_ranks, rank=rank)
        found = list(batches(of_all, axis, micro_batch_size))
        assert [len(batch) for batch in found] == [micro_batch_size] * num_batches
        scored += [window for batch in found for window in batch if window.scored]
        assert all(len(window.read) == 4 for batch in found for window in batch)
    assert sorted(scored, key=lambda window: window.scored.start) == of_all


@pytest.mark.parametrize("stride", [1, 3, 5])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_likelihood_is_that_of_each_token_but_the_first(stride: int, micro_batch_size: int):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (18,), generator=generator)
    logits = torch.randn(7, 7, generator=generator)

    def model(read: Tensor) -> Tensor:
        """Return logits that depend on the last token alone, so that windows change nothing."""
        assert read.shape[1] == 5
        return logits[read]

    found = negative_log_likelihood(model, tokens, windows(17, 5, stride), Axis.trivial("data"), micro_batch_size)
    expected = -logits.double().log_softmax(-1)[tokens[:-1], tokens[1:]].sum().item()
    assert found == pytest.approx(expected, rel=1e-5)  # sums of up to 5 values in fp32


def test_perplexities_are_means_over_words_and_over_tokens():
    score = Score(nll=6.0, num_tokens=4, num_words=3)
    assert (score.perplexity, score.token_perplexity) == (math.exp(2.0), math.exp(1.5))


def test_documents_begin_on_new_lines(tmp_path: Path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("one two", "", "three\n", "four")))
    assert read_text(Source([str(file)], "body", None, "test")) == "one two\nthree\nfour\n"
    file.write_text(json.dumps({"body": " \n"}) + "\n")
    with pytest.raises(DataError, match=r"--source .*documents.jsonl has 0 words"):
        read_text(Source([str(file)], "body", None, "test"))


def test_the_tokenizer_is_the_named_one_or_that_of_the_first_prefix(tmp_path: Path):
    prefix = write_text(tmp_path / "corpus")
    tokenizer = load_tokenizer(prefix)
    size = tokenizer.vocab_size
    named = tmp_path / "named.json"
    tokenizer.save(named)
    for name, path in ((None, str(prefix)), (None, [str(prefix), "nowhere"]), (str(named), "nowhere")):
        assert find_tokenizer(name, path, size).encode("green") == tokenizer.encode("green")
        with pytest.raises(ConfigError, match=f"model.vocab_size={size - 1} is below the {size} ids"):
            find_tokenizer(name, path, size - 1)
