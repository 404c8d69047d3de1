"""Small models with everything that is difficult for a ZeRO engine, and the loss of a batch."""

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens
from zero.activations.checkpointed_blocks import ActivationsConfig, checkpointed_blocks

VOCAB = 97
SEQ = 10


class ToyBlock(nn.Module):
    def __init__(self, checkpoints: bool):
        super().__init__()
        self.checkpoints = checkpoints
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7, 3))
        # Used for some batches only, hence on some ranks only; its bucket is reduced first.
        self.gate = nn.Linear(16, 16)

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
    """A model with a tied embedding and head, tied blocks, a buffer, and a parameter far larger than a bucket."""

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
    return with_checkpoints(transformers.GPT2LMHeadModel(config), checkpoints)


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize in the dtype of the input.

    The norms of transformers compute in fp32, where a difference of 1e-16 may round to 1e-7.
    """
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


class InputTypeNorm(nn.Module):
    """The class that the norms of this model get: those of other models in this process stay as they are."""

    forward = rms_norm


def with_input_type_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm | modeling_t5.T5LayerNorm):
            module.__class__ = InputTypeNorm
    return model


def llama(checkpoints: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
    )
    return with_checkpoints(with_input_type_norms(transformers.LlamaForCausalLM(config)), checkpoints)


class T5(nn.Module):
    """An encoder and a decoder that share their embedding and get the same tokens."""

    def __init__(self, checkpoints: bool):
        super().__init__()
        config = transformers.T5Config(
            num_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=VOCAB, dropout_rate=0
        )
        self.t5 = with_checkpoints(with_input_type_norms(transformers.T5ForConditionalGeneration(config)), checkpoints)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.t5(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits


def frozen_gpt2(checkpoints: bool) -> nn.Module:
    """Build a GPT-2 whose embeddings and first two blocks are frozen, except one bias."""
    model = transformers_gpt2(checkpoints)
    for module in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
        module.requires_grad_(False)
    model.transformer.h[1].ln_2.bias.requires_grad_(True)
    return model


def with_checkpoints(model: nn.Module, checkpoints: bool) -> nn.Module:
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Albert(nn.Module):
    """A model that calls one block several times and skips another; the order changes from step to step."""

    def __init__(self, checkpoints: bool):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(ToyBlock(checkpoints) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        output = {"x": self.tokens(tokens), "bias": self.head.bias[:16].sin()}
        for index in (0, 1, 0, 0, 1) if tokens[0, 0] % 2 else (1, 0, 2):
            output = self.blocks[index](output["x"], context={"bias": output["bias"], "tokens": tokens})
        return self.head(output["x"])


class Borrower(nn.Module):
    """A parent that reads the weight of a child, whose forward returns its bias to the parent."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter]:
            return F.linear(x, self.linear.weight), self.linear.bias

    def __init__(self, checkpoints: bool):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(Borrower.Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) @ self.blocks[2].linear.weight.cos()
        for block in self.blocks:
            product, bias = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = x + torch.tanh(product + bias)
        return self.head(x @ self.blocks[1].linear.weight.sin())


MODELS = {"gpt": gpt, "transformers_gpt2": transformers_gpt2, "toy": Toy}
HARDER_MODELS = {"llama": llama, "t5": T5, "frozen_gpt2": frozen_gpt2, "albert": Albert, "borrower": Borrower}


def build(name: str, checkpoints: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return (MODELS | HARDER_MODELS)[name](checkpoints).to(dtype)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss of the logits. The loss of transformers would be in fp32."""
    output = model(tokens)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=generator)
    tokens[0, 0] = step  # Albert chooses its branches by this token
    return tokens
