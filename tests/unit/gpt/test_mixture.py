"""The mixture of corpora: what a run reads of each, if weights and corpora change by resumes or a schedule."""

import json
import logging
from collections import Counter
from pathlib import Path
from shutil import copytree

import pytest

from data.blend import BlendedSamples
from gpt.checkpoint.layout import Progress
from gpt.mixture import arrange, mixture_at
from gpt.settings.data import ScheduledWeights
from gpt.settings.training import TrainSettings
from tests.unit.gpt.runs_in_process import make_trainer, write_text

STEPS, BATCH, START = 30, 8, Progress()
TRAIN = TrainSettings(steps=STEPS, global_batch_size=BATCH)


class Corpus:
    """A corpus whose samples are (its contents, their numbers)."""

    def __init__(self, prefix: str, fingerprint: str = ""):
        self.prefix, self.fingerprint = prefix, fingerprint or prefix

    def __getitem__(self, sample: int) -> tuple[str, int]:
        return self.fingerprint, sample


def read(corpora: list[Corpus], weights: list[float], schedule=(), progress=START, steps=STEPS):
    """Return the samples that a run reads from a progress on, and its progress in a checkpoint then."""
    samples, consumed = BlendedSamples(corpora, weights), steps * BATCH
    arrange(samples, schedule, TRAIN, progress)
    found = [samples[i] for i in range(progress.consumed_samples, consumed)]
    saved = json.loads(json.dumps(mixture_at(samples, consumed)))
    return found, Progress(steps, consumed, mixture=saved)


A, B, C = map(Corpus, "ABC")
SCHEDULE = (ScheduledWeights(0, (1, 0)), ScheduledWeights(10, (0.2, 0.8)), ScheduledWeights(20, (0, 1)))


@pytest.mark.parametrize("schedule", [(), SCHEDULE])
@pytest.mark.parametrize("stop", [0, 7, 10, 13, 20])
def test_a_run_that_resumes_reads_what_one_without_interruption_reads(schedule, stop: int, caplog):
    whole, _ = read([A, B], [0.3, 0.7], schedule)
    if schedule:
        counts = [Counter(corpus for corpus, _ in whole[first * BATCH : (first + 10) * BATCH]) for first in (0, 10, 20)]
        assert counts == [{"A": 80}, {"A": 16, "B": 64}, {"B": 80}]
    before, progress = read([A, B], [0.3, 0.7], schedule, steps=stop)
    after, _ = read([A, Corpus("elsewhere/B", "B")], [3, 7], schedule, progress)
    assert before + after == whole
    assert caplog.messages == []


def test_weights_that_change_at_a_resume_repeat_and_skip_nothing(caplog):
    before, progress = read([A, B], [0.5, 0.5], steps=10)
    between, progress = read([A, B], [0.9, 0.1], progress=progress, steps=20)
    after, _ = read([C, B], [1, 1], progress=progress)
    counts = Counter(corpus for corpus, _ in before + between + after)
    assert counts == {"A": 40 + 72, "B": 40 + 8 + 40, "C": 40}
    assert sorted(before + between + after) == [(name, i) for name in "ABC" for i in range(counts[name])]
    mixture, others, dropped = caplog.messages
    goes_on = "goes on at its sample 40"
    assert mixture.endswith(f"A has the weight 0.9 and {goes_on}; B has the weight 0.1 and {goes_on}")
    assert "C has the weight 0.5 and goes on at its sample 0; B" in others
    assert dropped == "A is not read any more, after 112 of its samples"


def test_a_checkpoint_of_an_earlier_version_goes_on_as_it_did():
    whole, _ = read([A, B], [0.3, 0.7])
    assert read([A, B], [0.3, 0.7], progress=Progress(10, 80))[0] == whole[80:]


def test_a_resume_notices_another_corpus_at_the_prefix_and_not_another_path(tmp_path: Path, caplog):
    (tmp_path / "data").mkdir()
    prefix = write_text(tmp_path / "data/corpus")
    settings = {"checkpoint__every": 1, "train__steps": 1, "schedule__decay": "constant"}
    make_trainer(prefix, tmp_path / "run", **settings).train()
    moved = copytree(tmp_path / "data", tmp_path / "moved") / "corpus"
    with caplog.at_level(logging.WARNING):
        make_trainer(moved, tmp_path / "run", **settings | {"train__steps": 2}).train()
        assert caplog.messages == []
        write_text(moved, "the green bottles on the wall")
        make_trainer(moved, tmp_path / "run", **settings | {"train__steps": 3}).train()
    assert caplog.messages == [f"{moved} has other contents than in the checkpoint: from here on, samples are others"]
