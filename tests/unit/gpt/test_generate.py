"""Generation: which tokens are sampled, from how much context, and without an effect on training."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.chosen_tokenizers import character_tokenizer
from gpt.generate import evaluation, generate, sample_texts
from parallel.errors import ConfigError
from tests.unit.gpt.model.models import small_config, small_gpt

PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def counting(tokens: Tensor) -> Tensor:
    """Return the logits of a model that counts: the next number is the likeliest, the one after it the second."""
    return 9.0 * F.one_hot((tokens + 1) % 50, 50) + 5.0 * F.one_hot((tokens + 2) % 50, 50)


def test_the_likeliest_token_follows_at_temperature_0_and_at_top_k_1():
    expected = torch.tensor([[3, 1, 4, 5, 6, 7], [1, 5, 9, 10, 11, 12]])
    assert generate(counting, PROMPT, num_tokens=3, seq_length=8, temperature=0).equal(expected)
    assert generate(counting, PROMPT, num_tokens=3, seq_length=8, top_k=1).equal(expected)


def test_only_the_top_k_tokens_appear_and_each_of_them_does():
    steps = generate(counting, PROMPT, num_tokens=200, seq_length=8, temperature=4.0, top_k=2).diff()[:, 2:] % 50
    assert steps.unique().tolist() == [1, 2]


def test_frequencies_follow_the_tempered_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drawn = generate(lambda tokens: logits.expand(*tokens.shape, 4), PROMPT[:, :1].repeat(500, 1), 10, 4, 1.7)[:, 1:]
    frequencies = drawn.flatten().bincount(minlength=4) / drawn.numel()
    expected = (logits / 1.7).softmax(-1)
    # Five standard errors of a frequency among n = 10,000 draws: 5 * 0.5 / sqrt(n).
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.025)


def test_the_context_never_exceeds_the_models_sequence():
    lengths = []

    def record(tokens: Tensor) -> Tensor:
        lengths.append(tokens.shape[1])
        return counting(tokens)

    assert generate(record, PROMPT, num_tokens=4, seq_length=5).shape == (2, 7)
    assert lengths == [3, 4, 5, 5]


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    model = small_gpt(small_config(dropout=0.1))
    first, second, other = (generate(model, PROMPT, 20, 16, seed=seed) for seed in (1, 1, 2))
    assert first.equal(second)
    assert not first.equal(other)


def test_generation_has_no_effect_on_training():
    model = small_gpt(small_config(dropout=0.1))
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    generate(model, PROMPT, 5, 16)
    assert torch.get_rng_state().equal(random_state)
    assert [module.training for module in model.modules()] == modes
    assert all(param.grad is None for param in model.parameters())


def test_a_model_generates_without_dropout():
    dropping, whole = (small_gpt(small_config(dropout=dropout)) for dropout in (0.5, 0.0))
    assert generate(dropping, PROMPT, 8, 16, temperature=0).equal(generate(whole, PROMPT, 8, 16, temperature=0))


def test_modes_are_restored_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    model[1].eval()
    with pytest.raises(ValueError, match="broken"), evaluation(model):
        raise ValueError("broken")
    assert [module.training for module in (model, *model)] == [True, True, False]


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 2}, {"top_k": 99}, {}])
def test_a_model_that_has_diverged_still_yields_tokens(settings):
    tokens = generate(lambda tokens: torch.full((*tokens.shape, 50), math.nan), PROMPT, 3, 8, **settings)
    assert tokens.shape == (2, 6)
    assert ((tokens >= 0) & (tokens < 50)).all()


class Alphabet(nn.Module):
    """A model of tokens that follow each other, the first after the last, in contexts of at most 4."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.module, self._vocab_size = nn.Linear(1, 1), vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= 4
        return 1e3 * F.one_hot((tokens + 1) % self._vocab_size, self._vocab_size)


def test_a_text_ends_at_the_end_of_text_token_or_after_its_tokens():
    tokenizer = character_tokenizer(["abcdefgh"])
    prompts = [tokenizer.encode(text) for text in ("a", "bc", "f", "h")]
    texts = list(sample_texts(Alphabet(tokenizer.vocab_size), tokenizer, prompts, num_tokens=3, seq_length=4))
    expected = {"a": "abcd", "bc": "bcdef", "f": "fgh", "h": "h"}
    assert texts == [{"prompt": prompt, "text": text} for prompt, text in expected.items()]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (PROMPT, {"temperature": -0.5}, "temperature=-0.5 is below 0"),
        (PROMPT, {"top_k": 0}, "top_k=0 is below 1"),
        (PROMPT[:, :0], {}, "the prompt has 0 tokens"),
    ],
)
def test_impossible_requests_are_refused(prompt, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate(counting, prompt, 3, 8, **settings)
