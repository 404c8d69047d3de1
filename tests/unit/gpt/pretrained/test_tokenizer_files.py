"""Exported weights come with the tokenizer of the training data, which transformers opens without a warning."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from data.chosen_tokenizers import character_tokenizer, train_tokenizer
from data.sidecar import Sidecar
from data.tokenizer import Tokenizer, tokenizer_path
from gpt.checkpoint.export import export_checkpoint
from gpt.pretrained.tokenizer_files import check_same_tokenizer, tokenizer_of_data
from gpt.pretrained.weights import write_weights
from gpt.shape.config import ModelConfig, parameter_shapes
from parallel.validation.errors import ConfigError
from tests.pretrained_weights import change_config
from tests.unit.gpt.model.models import preset_config
from tests.unit.gpt.runs_in_process import make_trainer

SX = ("<s>", "<x>")
TEXTS = ["the cat sat on the mat", "the mat sat on the cat", "naïve café\n\tdef f(x): return x"]


def config_for(tokenizer: Tokenizer, vocab_size: int | None = None) -> ModelConfig:
    return ModelConfig(1, 8, 2, 64, vocab_size=vocab_size or tokenizer.vocab_size, dropout=0.0)


def write_corpus(prefix: Path, tokenizer: Tokenizer) -> dict[str, str]:
    tokenizer.save(tokenizer_path(prefix))
    Sidecar(tokenizer.vocab_size, tokenizer.eod, "trained", 1, 1, []).save(prefix)
    return {"data.path": str(prefix)}


def write_zeros(folder: Path, config: ModelConfig, files: Tokenizer | None) -> None:
    shapes = parameter_shapes(config, config.vocab_size)
    write_weights(folder, config, ((name, torch.zeros(shape)) for name, shape in shapes), files)


@pytest.mark.parametrize("tokenizer", [train_tokenizer(TEXTS, 280), character_tokenizer(TEXTS)], ids=["bpe", "chars"])
def test_auto_classes_open_the_tokenizer_and_the_model(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data = write_corpus(tmp_path / "corpus", tokenizer)
    write_zeros(tmp_path / "out", config_for(tokenizer), tokenizer_of_data(data))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.bos_token_id == theirs.eos_token_id == tokenizer.eod
    assert theirs.encode(theirs.eos_token) == [tokenizer.eod]
    assert theirs.model_max_length == 64
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == config.eos_token_id == tokenizer.eod
    model.generate(torch.tensor([theirs.encode(TEXTS[0])[:3]]), max_new_tokens=2, do_sample=False)
    assert caplog.messages == []


@pytest.mark.parametrize("own", [None, "<s>"], ids=["nothing by itself", "a token by itself"])
@pytest.mark.parametrize("bos", [None, "<s>", "<x>"])
def test_an_exported_tokenizer_begins_texts_as_documents_began(own: str | None, bos: str | None, tmp_path: Path):
    backend = Backend.from_str(train_tokenizer(TEXTS, 280).text)
    backend.add_special_tokens(["<s>", "<x>"])
    if own:
        adding = processors.TemplateProcessing("<s> $A <x>", special_tokens=[(t, backend.token_to_id(t)) for t in SX])
        backend.post_processor = adding
    tokenizer = Tokenizer(backend, 0, backend.token_to_id(bos) if bos else None)
    write_zeros(tmp_path, config_for(tokenizer), tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXTS[0]) == [*tokenizer.beginning, *tokenizer.encode(TEXTS[0])]
    assert theirs.encode(TEXTS[0], add_special_tokens=False) == tokenizer.encode(TEXTS[0])


def test_an_export_without_a_tokenizer_is_a_warning_and_has_no_ids_of_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = tokenizer_of_data({"data.path": ["0.5:nowhere", "0.5:elsewhere"]})
    (message,) = caplog.messages
    assert "nowhere.tokenizer.json does not exist" in message
    assert "--data" in message
    write_zeros(tmp_path, config_for(character_tokenizer(TEXTS)), files)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["bos_token_id"] is None
    assert content["eos_token_id"] is None
    assert not (tmp_path / "tokenizer_config.json").exists()


def test_weights_with_another_tokenizer_than_the_data_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first, second = (character_tokenizer([letters]) for letters in ("abc", "abd"))
    backend = Backend.from_str(first.text)
    backend.add_special_tokens(["<|im_end|>"])  # which the data does not have
    backend.save(str(tmp_path / "tokenizer.json"))
    check_same_tokenizer(tmp_path, first)
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"id 3 is 'c', and 'd' in the data; prepare that with --tokenizer"):
        check_same_tokenizer(tmp_path, second)
    check_same_tokenizer(tmp_path, Tokenizer(Backend.from_str(first.text), 0, bos=1))
    assert "begin with 1, and the tokenizer of" in caplog.messages[0]
    caplog.clear()
    check_same_tokenizer(tmp_path, None)
    check_same_tokenizer(tmp_path / "none", first)
    assert len(caplog.messages) == 2


def write_origin(folder: Path, tokenizer: Tokenizer) -> dict[str, object]:
    """Write a Llama of 64 positions with ids, tokenizer and chat template of its own; return its options."""
    config = preset_config("llama2", num_layers=1, hidden_size=8, num_heads=2, seq_length=64, vocab_size=64)
    write_zeros(folder, config, None)
    change_config(folder, lambda content: content.update(bos_token_id=3, eos_token_id=[4, 5]))
    backend = Backend.from_str(tokenizer.text)
    backend.add_special_tokens(["<s>"])
    start = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[start])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", model_max_length=64)
    theirs.chat_template = "{{ messages }}"
    theirs.save_pretrained(folder)
    parts = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "mlp_width": 40, "biases": False, "tied_head": False}
    return {f"model__{name}": value for name, value in parts.items()} | {"train__initial_weights": folder}


def test_weights_that_continue_others_have_their_positions_ids_tokenizer_and_chat_template(
    prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    origin = tmp_path / "origin"
    settings = write_origin(origin, train_tokenizer(TEXTS, 280))
    checkpoints = {"checkpoint__every": 2, "checkpoint__weights": "true", "train__steps": 2}
    make_trainer(prefix, tmp_path, **settings, **checkpoints).train()
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "offline", torch.float32)
    for folder in (tmp_path / "weights/step-00000002", tmp_path / "offline"):
        config, theirs = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_id) == (64, 3, [4, 5])
        assert theirs.chat_template == "{{ messages }}"
        assert theirs.encode(TEXTS[0]) == AutoTokenizer.from_pretrained(origin).encode(TEXTS[0])
        assert (folder / "tokenizer.json").read_bytes() == (origin / "tokenizer.json").read_bytes()
    # A tokenizer that is named replaces that of the initial weights, and a folder that has gone is a warning.
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "named", torch.float32, data=str(prefix))
    assert AutoConfig.from_pretrained(tmp_path / "named").max_position_embeddings == 64
    assert AutoTokenizer.from_pretrained(tmp_path / "named").chat_template is None
    assert caplog.messages == []
    other = character_tokenizer(["of as many", *"ABCDEFGHIJKLM"])
    data = write_corpus(tmp_path / "larger", other)["data.path"]
    with pytest.raises(ConfigError, match="was trained with another tokenizer: ids meant other tokens; name the"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "refused", torch.float32, data=data)
    origin.rename(tmp_path / "moved")
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "gone", torch.float32)
    assert "origin/config.json is not there" in caplog.messages[0]
    assert AutoConfig.from_pretrained(tmp_path / "gone").max_position_embeddings == 8
    moved = str(tmp_path / "moved")
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "found", torch.float32, initial_weights=moved)
    assert AutoConfig.from_pretrained(tmp_path / "found").max_position_embeddings == 64
