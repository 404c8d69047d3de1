"""Generation: which tokens are sampled, from how much context, and without an effect on training."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.chosen_tokenizers import character_tokenizer
from gpt.generate import TEMPERATURE, TOP_K, evaluation, generate, sample_texts
from tests.unit.gpt.model.models import small_config, small_gpt

PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


class Model(nn.Module):
    """A model that is a function of tokens."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.module, self._function = nn.Linear(1, 1), function

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        return self._function(tokens)


def following(vocab_size: int) -> Model:
    """Return a model of tokens that follow each other, the first after the last, in contexts of at most 4."""

    def logits(tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= 4
        return 1e3 * F.one_hot((tokens + 1) % vocab_size, vocab_size)

    return Model(logits)


def test_each_row_is_continued_and_the_context_never_exceeds_the_sequence():
    expected = torch.tensor([[3, 1, 4, 5, 6, 7], [1, 5, 9, 10, 11, 12]])
    assert generate(following(50), PROMPT, num_tokens=3, seq_length=4).equal(expected)


def test_cudnn_which_makes_a_plan_for_each_length_computes_no_attention():
    found, model = [], following(50)
    model.register_forward_hook(lambda *_: found.append(torch.backends.cuda.cudnn_sdp_enabled()))
    generate(model, PROMPT, num_tokens=2, seq_length=4)
    assert found == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_frequencies_follow_the_tempered_softmax_of_the_likeliest():
    logits = torch.cat([torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.full((TOP_K,), -3.0)])
    model = Model(lambda tokens: logits.expand(*tokens.shape, len(logits)))
    drawn = generate(model, PROMPT[:, :1].repeat(500, 1), 10, 4)[:, 1:]
    frequencies = drawn.flatten().bincount(minlength=len(logits)) / drawn.numel()
    likeliest = logits.topk(TOP_K)
    expected = torch.zeros_like(logits).scatter(0, likeliest.indices, (likeliest.values / TEMPERATURE).softmax(-1))
    # Five standard errors of a frequency among n = 10,000 draws: 5 * 0.5 / sqrt(n).
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.025)
    assert (frequencies > 0).sum() <= TOP_K < len(logits)


def test_generation_has_no_effect_on_training_and_draws_no_dropout():
    dropping, whole = (small_gpt(small_config(dropout=dropout)) for dropout in (0.5, 0.0))
    random_state = torch.get_rng_state()
    assert generate(dropping, PROMPT, 8, 16).equal(generate(whole, PROMPT, 8, 16))
    assert torch.get_rng_state().equal(random_state)
    assert all(module.training for module in dropping.modules())
    assert all(param.grad is None for param in dropping.parameters())


@pytest.mark.parametrize("was_training", [True, False])
def test_the_mode_is_restored_after_an_error(was_training: bool):
    model = nn.Sequential(nn.Dropout()).train(was_training)
    with pytest.raises(ValueError, match="broken"), evaluation(model):
        raise ValueError("broken")
    assert [module.training for module in (model, *model)] == [was_training] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_has_diverged_still_yields_tokens(value: float):
    tokens = generate(Model(lambda tokens: torch.full((*tokens.shape, 50), value)), PROMPT, 3, 8)
    assert tokens.shape == (2, 6)
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_a_text_ends_at_the_end_of_text_token_or_after_its_tokens():
    tokenizer = character_tokenizer(["abcdefgh"])
    prompts = [tokenizer.encode(text) for text in ("a", "bc", "f", "h")]
    texts = list(sample_texts(following(tokenizer.vocab_size), tokenizer, prompts, num_tokens=3, seq_length=4))
    expected = {"a": "abcd", "bc": "bcdef", "f": "fgh", "h": "h"}
    assert texts == [{"prompt": prompt, "text": text} for prompt, text in expected.items()]
