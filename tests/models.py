"""Small models with everything that troubles a ZeRO engine, and the loss of a batch."""

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt.model import GPT, ModelConfig, initialize
from parallel.mesh import Axis
from parallel.tokens import ReplicatedTokens
from zero.activations import ActivationsConfig, checkpointed_blocks

VOCAB = 97
SEQ = 10


class ToyBlock(nn.Module):
    def __init__(self, checkpoints: bool):
        super().__init__()
        self.checkpoints = checkpoints
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7, 3))
        self.gate = nn.Linear(16, 16)  # used for some batches, hence on some ranks; its window is the first to go

    def forward(self, x: Tensor, *, context: dict) -> dict:
        h = checkpoint(self.mlp, x, use_reentrant=False) if self.checkpoints else self.mlp(x)
        h = h + context["bias"] * self.frozen
        if context["tokens"].sum() % 2:
            h = h * self.gate(x)
        return {"x": x + h, "bias": context["bias"]}

    def mlp(self, x: Tensor) -> Tensor:
        scale = self.up.weight / self.up.weight.norm()  # a chain of weights only: its backward reads the weight
        return self.down(F.gelu(F.linear(self.norm(x), scale, self.up.bias)))


class Toy(nn.Module):
    """Tied embedding and head, tied weights across blocks, a buffer, one parameter far larger than a window."""

    def __init__(self, checkpoints: bool):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.large = nn.Linear(16, 16 * 40)
        self.blocks = nn.ModuleList(ToyBlock(checkpoints) for _ in range(3))
        self.blocks[2].down.weight = self.blocks[0].down.weight
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("temperature", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.large(x).unflatten(-1, (16, 40)).mean(-1)
        bias = self.bias.tanh()
        for block in self.blocks:
            output = block(x, context={"bias": bias, "tokens": tokens})
            x, bias = output["x"], output["bias"]
        return F.linear(x, self.tokens.weight) / self.temperature


def gpt(checkpoints: bool) -> nn.Module:
    config = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, seq_length=SEQ, vocab_size=VOCAB, dropout=0.0)
    activations = ActivationsConfig(store="keep" if checkpoints else "none", layers_per_checkpoint=2)
    model = GPT(config, ReplicatedTokens(Axis.trivial("tensor")), checkpointed_blocks(activations))
    initialize(model, seed=0)
    return model


def transformers_gpt2(checkpoints: bool) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=SEQ, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


MODELS = {"gpt": gpt, "transformers_gpt2": transformers_gpt2, "toy": Toy}


def build(name: str, checkpoints: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](checkpoints).to(dtype)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token loss, from the logits: transformers' own loss would be in fp32."""
    output = model(tokens)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank)
    return torch.randint(0, VOCAB, (2, SEQ), generator=generator)
