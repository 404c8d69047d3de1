"""Llama of transformers is saved, resumed on other numbers of ranks at other stages, and opened by from_pretrained."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from parallel.mesh import Axis, Mesh
from parallel.validation.errors import ConfigError
from tests.distributed.zero.architectures.precision import computing_in_float64
from tests.ranks import run_ranks
from zero import Saver, ZeroConfig, ZeroDataParallel, ZeroOptimizer, export, load, save

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    tie_word_embeddings=True,
)
GLOBAL_BATCH, FIRST_STEPS, STEPS = 4, 2, 5
Trained = dict[str, Any]  # losses of the global batches, learning rates, and logits


class Run:
    """A Llama in training; its sequences do not depend on the number of ranks."""

    def __init__(self, stage: int, seed: int):
        torch.manual_seed(seed)
        self.data = Mesh.create(tensor_size=1).data
        with computing_in_float64():
            llama = LlamaForCausalLM(CONFIG).double()
        self.model = ZeroDataParallel(llama, self.data, ZeroConfig(stage, bucket_numel=700))
        matrices, rest = [[p for p in self.model.module.parameters() if (p.dim() > 1) is m] for m in (True, False)]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest}]
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, groups, clip_norm=0.5, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer.inner, T_max=STEPS)
        self.rates: list[float] = []

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            ids = batch(step).chunk(self.data.size)[self.data.rank]
            with computing_in_float64():
                loss = self.model(input_ids=ids, labels=ids).loss
                loss.backward()
            self.optimizer.step()
            self.rates += [group["lr"] for group in self.optimizer.inner.param_groups]
            self.scheduler.step()
            total = loss.detach() / self.data.size
            self.data.all_reduce(total, out=total).wait()
            losses.append(total.item())
        return losses

    def result(self, losses: list[float], random: Tensor) -> tuple[Trained, Tensor]:
        with torch.no_grad(), computing_in_float64():
            logits = self.model(input_ids=batch(9)).logits
        return {"losses": losses, "rates": self.rates[-2 * (STEPS - FIRST_STEPS) :], "logits": logits}, random


def batch(step: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (GLOBAL_BATCH, 8), generator=torch.Generator().manual_seed(step))


def save_and_train_on(folder: Path) -> tuple[Trained, Tensor]:
    """Save at stage 3 while training goes on, and export."""
    run = Run(stage=3, seed=3)
    run.train(range(FIRST_STEPS))
    torch.manual_seed(50 + run.data.rank)
    saver = Saver(run.model, run.optimizer)
    saver.start(folder / "checkpoint", {"step": FIRST_STEPS, "scheduler": run.scheduler.state_dict()})
    random = torch.rand(3)
    losses = run.train(range(FIRST_STEPS, STEPS))
    assert saver.wait() == folder / "checkpoint"
    export(folder / "exported", run.model, tokenizer=tokenizer(), file_bytes=4000)
    return run.result(losses, random)


def error_of_loading_what_each_rank_finds(folder: Path) -> str:
    data = Mesh.create(tensor_size=1).data
    with contextlib.chdir(folder / str(data.rank)), pytest.raises(ConfigError) as raised:
        load("saved", ZeroDataParallel(nn.Linear(2, 3), data, ZeroConfig(1)))
    return str(raised.value).replace(f"{folder}/{data.rank}", "DISK")


def test_ranks_that_find_different_checkpoints_at_one_path_load_none(tmp_path: Path):
    for rank in range(2):
        save(tmp_path / str(rank) / "saved", ZeroDataParallel(nn.Linear(2, 3), Axis.trivial("data"), ZeroConfig(1)))
    found = run_ranks(2, error_of_loading_what_each_rank_finds, tmp_path)
    assert found[0].startswith("the ranks find different checkpoints in DISK/saved, as on disks of their own")
    assert found[1] == found[0]


def resume(folder: Path, stage: int) -> tuple[Trained, Tensor]:
    run = Run(stage, seed=4)
    extra = load(folder / "checkpoint", run.model, run.optimizer)
    run.scheduler.load_state_dict(extra["scheduler"])
    random = torch.rand(3)
    return run.result(run.train(range(extra["step"], STEPS)), random)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(CONFIG.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def test_llama_is_saved_on_2_ranks_resumed_on_1_and_4_and_opened_by_from_pretrained(tmp_path: Path):
    saved = run_ranks(2, save_and_train_on, tmp_path)
    four = run_ranks(4, resume, tmp_path, 2)
    one = resume(tmp_path, 1)
    expected = saved[0][0]
    for trained, _ in (one, *four):
        torch.testing.assert_close(trained, expected, rtol=1e-10, atol=1e-10)
    for (_, random), (_, expected_random) in zip([one, *four[:2]], [saved[0], *saved], strict=True):
        assert random.equal(expected_random)
    assert len({tuple(random.tolist()) for _, random in four[:3]}) == 3  # the third rank is new

    folder = tmp_path / "exported"
    with torch.no_grad(), computing_in_float64():
        module = AutoModelForCausalLM.from_pretrained(folder)
        logits = module(input_ids=batch(9)).logits
    assert isinstance(module, LlamaForCausalLM)
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-10, atol=1e-10)
    assert AutoTokenizer.from_pretrained(folder).encode("w3 w17") == [3, 17]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert names.keys() == LlamaForCausalLM(CONFIG).state_dict().keys() - {"lm_head.weight"}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
