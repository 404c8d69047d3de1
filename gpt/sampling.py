"""Short texts that the model generates during a run and at its end, for a person to read."""

from collections.abc import Iterator, Sequence

import torch

from data.tokenizer import Tokenizer
from gpt.model.generate import generate
from zero.engine import ZeroDataParallel


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
        continuation = generate(model, ids, num_tokens, seq_length, temperature=0.8, top_k=40)[
            0, len(prompt) :
        ].tolist()
        end = continuation.index(tokenizer.eod) if tokenizer.eod in continuation else num_tokens
        yield {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(prompt + continuation[:end])}
