"""Generation of text, token by token, by sampling with a temperature from the likeliest tokens."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.tokenizer import Tokenizer
from zero.data_parallel import ZeroDataParallel

TEMPERATURE, TOP_K = 0.8, 40
MAX_LOGIT = 1e30  # which is finite when it is divided by the temperature
SEED = 0


def sample_texts(
    model: ZeroDataParallel, tokenizer: Tokenizer, prompts: Sequence[list[int]], num_tokens: int, seq_length: int
) -> Iterator[dict[str, str]]:
    """Yield {"prompt", "text"} for each prompt; the text is the prompt with its continuation.

    It ends at the end-of-text token if the model generates one. `prompts` are token ids. All ranks call this together,
    because parameters may have to be unsharded.
    """
    device = next(model.module.parameters()).device
    for prompt in prompts:
        tokens = generate(model, torch.tensor([prompt], device=device), num_tokens, seq_length)
        continuation = tokens[0, len(prompt) :].tolist()
        end = continuation.index(tokenizer.eod) if tokenizer.eod in continuation else num_tokens
        yield {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(prompt + continuation[:end])}


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, num_tokens: int, seq_length: int) -> Tensor:
    """Return each row of `prompt` (batch, n) continued by `num_tokens` tokens, (batch, n + num_tokens).

    `model` maps tokens (batch, m), m <= seq_length, to logits (batch, m, vocab). It is called exactly `num_tokens`
    times, and the result depends on the arguments alone, so ranks that share a model may all call this at once.
    """
    # A generator of its own, so that training's random stream does not change; on the CPU, so that the text is the same
    # on every device.
    generator = torch.Generator("cpu").manual_seed(SEED)
    tokens = prompt
    with evaluation(model), attention_of_any_length():
        for _ in range(num_tokens):
            logits = model(tokens[:, -seq_length:])[:, -1].float().cpu()
            # A model that has diverged still yields tokens, and all ranks go on alike.
            logits = logits.nan_to_num().clamp(-MAX_LOGIT, MAX_LOGIT)
            likeliest, ids = logits.topk(min(TOP_K, logits.shape[-1]))
            choice = torch.multinomial((likeliest / TEMPERATURE).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, ids.gather(-1, choice).to(tokens.device)], dim=1)
    return tokens


def attention_of_any_length() -> AbstractContextManager[None]:
    """Keep attention from cuDNN in this context, for batches of many lengths: it makes a plan for each new shape."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside this context, and then in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
