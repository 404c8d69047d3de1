"""Generation of text, token by token, by sampling with a temperature from the `top_k` likeliest tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from data.tokenizer import Tokenizer
from parallel.errors import ConfigError
from zero.engine import ZeroDataParallel

TEMPERATURE, TOP_K = 0.8, 40  # of the texts that show how training goes


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Tensor,
    num_tokens: int,
    seq_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Return each row of `prompt` (batch, n) continued by `num_tokens` tokens, (batch, n + num_tokens).

    `model` maps tokens (batch, m), m <= seq_length, to logits (batch, m, vocab). If it is a module, it is in evaluation
    mode during the call. Temperature 0 selects the likeliest token. The model is called exactly `num_tokens` times, and
    the result depends on the arguments alone, so ranks that share a model may all call this at once.

    Raises ConfigError if `temperature`, `top_k` or the length of the prompt is out of range.
    """
    if temperature < 0:
        raise ConfigError(f"temperature={temperature} is below 0; choose 0 for the likeliest token, 1 for a sample")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k} is below 1; choose 1 or more, or null for all tokens")
    if prompt.shape[1] < 1:
        raise ConfigError("the prompt has 0 tokens, 1 or more are needed; start with the end-of-text token")
    # A generator of its own, so that training's random stream does not change; on the CPU, so that the text is the same
    # on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = prompt
    with evaluation(model):
        for _ in range(num_tokens):
            logits = model(tokens[:, -seq_length:])[:, -1]
            next_tokens = _sample(logits.float().cpu(), temperature, top_k, generator)
            tokens = torch.cat([tokens, next_tokens.to(tokens.device)], dim=1)
    return tokens


def sample_texts(
    model: ZeroDataParallel, tokenizer: Tokenizer, prompts: Sequence[list[int]], num_tokens: int, seq_length: int
) -> Iterator[dict[str, str]]:
    """Yield {"prompt", "text"} for each prompt; the text is the prompt with its continuation.

    It ends at the end-of-text token if the model generates one. `prompts` are token ids. All ranks call this together,
    because parameters may have to be unsharded.
    """
    device = next(model.module.parameters()).device
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        tokens = generate(model, ids, num_tokens, seq_length, temperature=TEMPERATURE, top_k=TOP_K)
        continuation = tokens[0, len(prompt) :].tolist()
        end = continuation.index(tokenizer.eod) if tokenizer.eod in continuation else num_tokens
        yield {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(prompt + continuation[:end])}


@contextmanager
def evaluation(model: object) -> Iterator[None]:
    """Put every module of the model in evaluation mode, and restore each mode at the end.

    A model that is not an nn.Module is left as it is.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    were_training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Sample one token per row: (batch, vocab) -> (batch, 1)."""
    logits = logits.nan_to_num()  # so that a model that has diverged still yields tokens, and all ranks go on alike
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    choice = torch.multinomial((likeliest / temperature).softmax(dim=-1), 1, generator=generator)
    return ids.gather(-1, choice)
