"""Short texts that the model generates at the end of a run, for a person to read."""

from collections.abc import Iterator, Sequence

import torch

from data.tokenizer import Tokenizer
from gpt.model.generate import generate
from zero.engine import ZeroDataParallel


def sample_texts(
    model: ZeroDataParallel, tokenizer: Tokenizer, prompts: Sequence[str], num_tokens: int, seq_length: int
) -> Iterator[str]:
    """Yield each prompt with its continuation, up to the end-of-text token if the model generates one.

    All ranks call this together, because parameters may have to be unsharded.
    """
    device = next(model.module.parameters()).device
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eod]], device=device)
        tokens = generate(model, ids, num_tokens, seq_length, temperature=0.8, top_k=40)[0].tolist()
        end = tokens.index(tokenizer.eod, 1) if tokenizer.eod in tokens[1:] else len(tokens)
        yield tokenizer.decode(tokens[:end])
