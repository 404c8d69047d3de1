"""The data of a run: what is opened, cached and refused, and what is logged of packed samples."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import samples as samples_of_data
from data.indexed import IndexedDataset
from data.sidecar import Sidecar
from data.tokenizer import load_tokenizer, tokenizer_path
from gpt.corpus import Corpus
from parallel.mesh import Mesh
from parallel.validation.errors import ConfigError
from parallel.world import World
from tests.unit.gpt.runs_in_process import NUM_DOCUMENTS, SEQ_LENGTH, make_trainer, tiny_settings, write_text


def opened(prefix: Path, local_rank: int = 0, **settings: object) -> Corpus:
    chosen = tiny_settings(prefix, prefix.parent / "run", **settings)
    world = World(local_rank, 2, local_rank, 2, torch.device("cpu"))
    return Corpus.open(chosen.data, chosen.model, chosen.train, Mesh.create(1), world)


@pytest.mark.parametrize("masks_documents", [False, True])
@pytest.mark.parametrize("part", ["training", "validation"])
def test_prompts_are_the_beginnings_of_samples_that_are_not_trained_on_if_there_are_any(
    prefix: Path, part: str, masks_documents: bool
):
    settings = {"model__seq_length": 10, "data__mask_documents": masks_documents}
    corpus = opened(prefix, train__eval_samples=2 if part == "validation" else 0, **settings)
    assert bool(corpus.validation) == (part == "validation")
    assert corpus.tokens_per_sample == 10
    loader = corpus.validation[""] if part == "validation" else corpus.training
    ((first, second),) = loader.steps([(0, 4)])
    rows = torch.cat([first.tokens, second.tokens] if masks_documents else [first, second])
    assert corpus.prompts == rows[:3, :8].tolist()


def test_prompts_are_encoded(prefix: Path):
    tokenizer = load_tokenizer(prefix)
    expected = [tokenizer.encode("green"), tokenizer.encode("wall")]
    assert opened(prefix, train__prompts="[green, wall]").prompts == expected


def test_tokens_of_another_program_have_no_tokenizer_and_no_prompts(prefix: Path, tmp_path: Path):
    other = Path(shutil.copytree(prefix.parent, tmp_path / "other")) / prefix.name
    tokenizer_path(other).unlink()
    other.with_suffix(".json").unlink()
    corpus = opened(other, model__vocab_size=20, model__vocab_multiple=1)
    assert (corpus.tokenizer, corpus.prompts) == (None, [])


def test_a_vocabulary_that_the_model_lacks_is_refused_in_each_prefix(prefix: Path, tmp_path: Path):
    size = load_tokenizer(prefix).vocab_size
    small = Path(shutil.copytree(prefix.parent, tmp_path / "small")) / prefix.name
    small.with_suffix(".json").unlink()  # tokens whose vocabulary is not known
    assert opened(prefix, model__vocab_size=size).tokenizer is not None
    with pytest.raises(ConfigError, match=f"model.vocab_size={size - 1} is below the {size} ids of {prefix}; choose"):
        opened(prefix, model__vocab_size=size - 1, data__path=[str(small), str(prefix)])


def test_corpora_with_other_tokenizers_of_the_same_size_are_refused(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    other, same, unknown = (tmp_path / name for name in ("other", "same", "unknown"))
    write_text(other, "GREEN BOTTLES ON THE WALL")
    assert load_tokenizer(other).vocab_size == load_tokenizer(prefix).vocab_size
    facts = Sidecar.load(write_text(same))
    replace(facts, vocabulary_hash=load_tokenizer(same).vocabulary_hash).save(same)
    tokenizer_path(same).unlink()
    opened(prefix, data__path=[str(prefix), str(same)])
    assert caplog.messages == []
    write_text(unknown).with_suffix(".json").unlink()
    opened(prefix, data__path=[str(prefix), str(unknown)])
    assert caplog.messages[0].startswith(f"{unknown} has no tokenizer")
    refused = rf"{other} was encoded with another tokenizer than {prefix}: .*; prepare it again with --tokenizer"
    for settings in ({"data__path": [str(prefix), str(other)]}, {"data__validation": [str(other)]}):
        with pytest.raises(ConfigError, match=refused):
            opened(prefix, train__eval_samples=2, **settings)
    replace(facts, eod=1, vocabulary_hash=load_tokenizer(prefix).vocabulary_hash).save(same)
    with pytest.raises(ConfigError, match="or ends or begins documents in one only"):
        opened(prefix, data__path=[str(prefix), str(same)])


def test_a_resume_with_another_tokenizer_of_the_same_size_is_refused(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saving = {"checkpoint__every": 1, "train__steps": 1}
    make_trainer(prefix, tmp_path / "run", **saving).train()
    other = write_text(tmp_path / "other", "GREEN BOTTLES ON THE WALL")
    with pytest.raises(ConfigError, match=r"step-00000001 was trained with another tokenizer: .* another run.dir"):
        make_trainer(other, tmp_path / "run", **saving).train()
    Sidecar.path(other).unlink()
    tokenizer_path(other).unlink()
    make_trainer(other, tmp_path / "run", model__vocab_size=64, **saving).train()
    assert any(message.startswith("this run does not say its tokenizer") for message in caplog.messages)


def test_one_rank_of_a_node_caches_the_orders_of_the_epochs_that_the_run_reads(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples_of_data, "MIN_CACHED_ENTRIES", 0)
    lengths = IndexedDataset(prefix).sequence_lengths[: round(0.6 * NUM_DOCUMENTS)]
    per_epoch = (int(lengths.sum()) - 1) // SEQ_LENGTH

    def num_cached(name: str, num_steps: int, **options: object) -> int:
        batch = {"train__global_batch_size": 1, "train__micro_batch_size": 1, "train__steps": num_steps}
        opened(prefix, data__cache_dir=tmp_path / name, **batch, **options)
        return len(list((tmp_path / name).glob("*shuffle*"))) if (tmp_path / name).exists() else 0

    assert [num_cached(f"of-{steps}", steps) for steps in (per_epoch, per_epoch + 1)] == [1, 2]
    assert num_cached("of-a-validation", 1, train__eval_samples=2) == 2
    assert num_cached("of-another-rank", 1, local_rank=1, train__prompts="[green]") == 0


@pytest.mark.parametrize(("seq_length", "level"), [(SEQ_LENGTH, logging.INFO), (512, logging.WARNING)])
def test_the_padding_of_packed_samples_alone_is_logged_and_more_than_a_hundredth_is_a_warning(
    prefix: Path, caplog: pytest.LogCaptureFixture, seq_length: int, level: int
):
    caplog.set_level(logging.INFO)
    opened(prefix)
    assert not caplog.messages
    settings = {"data__packing": "best_fit", "data__mask_documents": True, "model__seq_length": seq_length}
    share = 100 * (1 - opened(prefix, **settings).tokens_per_sample / seq_length)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"train: {share:.3f}% of the positions are padding")
    assert record.levelno == level == (logging.WARNING if share > 1 else logging.INFO)
    assert ("raise model.seq_length" in record.getMessage()) == (level == logging.WARNING)
