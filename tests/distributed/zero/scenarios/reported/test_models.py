"""Models, forwards and backwards that were reported elsewhere."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.zero.scenarios.reported.reports import (
    Table,
    With,
    adapted,
    as_one_test,
    param,
    trains,
    trains_by,
)
from tests.scenarios import WIDTH, Block, Blocks, Calls, Model, Run, mean_square


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def scaled(*shapes: tuple[int, ...]) -> nn.Module:
    """Return a block whose parameters have these shapes; kernels need addresses that are multiples of 16 bytes."""

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        assert all(scale.data_ptr() % 16 == 0 for scale in block.scales)
        return x + sum((x * scale.mean()).tanh() for scale in block.scales if scale.numel())

    return With(forward, scales=nn.ParameterList(param(*shape) for shape in shapes))


def with_empty_parameters() -> nn.Module:
    return Blocks(scaled((0,), (2,)), With(lambda m, x: m.block(x), block=scaled((5,), (4, 0)), last=param(0, 2)))


def convolution() -> nn.Module:
    conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
    return With(lambda m, x: x + m.conv(x.view(-1, 2, 2, 1)).reshape(x.shape), conv=conv)


class Listed(nn.ModuleList):
    """A list of modules that is called, and has a parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x * self.scale))


class Named(nn.ModuleDict):
    """A dictionary of modules that is called."""

    def forward(self, x: Tensor) -> Tensor:
        return self["b"](self["a"](x)) + x


def containers() -> nn.Module:
    module = Listed([Named({"a": Block(), "b": Listed([Block(), Block()])}), Block()])
    module.scale, module[0]["b"].scale = param(WIDTH), param(WIDTH)
    return Blocks(module, Named({"a": Block(), "b": nn.Linear(WIDTH, WIDTH)}))


def quantized() -> nn.Module:
    codes = nn.Parameter(torch.randint(0, 9, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
    return With(lambda m, x: m.block(x) + x @ (m.codes.to(x.dtype) - 4) / 8, block=Block(), codes=codes)


def tokens_of(x: Tensor) -> Tensor:
    return (x * 5).long().abs() % 7


def language() -> nn.Module:
    """Return a model of tokens with learned positions, whose head is its embedding; token 0 is padding."""

    def forward(m: nn.Module, tokens: Tensor, table: Tensor) -> Tensor:
        x = m.embed(tokens) + m.positions
        for block in m.blocks:
            x = (torch.fft.fft(block(x)) * table).real
        return m.head(x)

    embed, head = nn.Embedding(7, WIDTH, padding_idx=0), nn.Linear(WIDTH, 7, bias=False)
    head.weight = embed.weight
    blocks = nn.ModuleList([Block(), Block()])
    return With(forward, embed=embed, positions=param(1, WIDTH, WIDTH), blocks=blocks, head=head)


def next_token(table: Tensor, model: Model, x: Tensor) -> Tensor:
    tokens = tokens_of(x)
    return F.cross_entropy(model(tokens, table=table)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def queries() -> nn.Module:
    """Return a model whose first block has no input, and the second one integers."""
    blocks = With(lambda m: m.query, query=param(WIDTH)), nn.Embedding(7, WIDTH), Block()
    return With(
        lambda m, x: m.blocks[2](m.blocks[0]() + m.blocks[1](tokens_of(x)).sum(1)), blocks=nn.ModuleList(blocks)
    )


def ignores() -> nn.Module:
    """Return a model with a frozen block that does not use an input which needs a gradient."""
    middle = With(lambda m, x, _ignored: m.block(x), block=frozen(Block()))
    return Calls(lambda m, h: m(h.detach().cos(), h) + h if m is middle else m(h), Block(), middle, Block())


def far_from_reference(model: Model, x: Tensor) -> Tensor:
    outputs = []
    for adapts in (False, True):
        for block in model.module.blocks:
            block.adapts = adapts
        with torch.set_grad_enabled(adapts):
            outputs.append(model(x))
    return (outputs[1] - outputs[0] - 0.5).square().mean()


def error(y: Tensor, num_rows: int) -> Tensor:
    """Return the part of a mean over `num_rows` rows that these rows contribute."""
    return (y - 0.5).square().sum() / (num_rows * y.shape[1])


def in_chunks(model: Model, hidden: list[Tensor], head: Callable[[Tensor], Tensor]) -> None:
    """Run the head and its backward on one row at a time, then the backward of what comes before the head."""
    cut = [h.detach().requires_grad_() for h in hidden]
    with model.accumulate():
        for row in range(len(cut[0])):
            for h in cut:
                error(head(h[row : row + 1]), len(h)).backward()
    torch.autograd.backward(hidden, [h.grad for h in cut])


def predict_twice(model: Model, x: Tensor) -> None:
    hidden = model.module.encode(x)
    in_chunks(model, [hidden, model.module.blocks[1](hidden + x)], model.module.head)


def with_tail(call: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return a model with a norm and a head in one unit, of which a forward may run one."""
    tail = With(call, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 2))  # which is not called itself
    return With(call, body=Blocks(), tail=tail)


def keep_logits(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.tail.norm(m.body.encode(x))
    y = m.tail.head(hidden)
    m.tail.logits = m.tail.head(m.tail.norm(m.body.blocks[0](hidden)))
    return y


def with_logits(model: Model, x: Tensor) -> None:
    (mean_square(model, x) + model.module.tail.logits.square().mean()).backward()


class Keeps(Blocks):
    """A model whose loss uses an activation, and not the output."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.embed(self.embed(x)).tanh()  # its backward reads the weight
        return super().forward(self.kept)


def add_to_view(block: nn.Module, h: Tensor) -> Tensor:
    y = block(h).unsqueeze(0)[0]
    y += h
    return y


def with_gradient(model: Model, x: Tensor) -> None:
    y = model(x)
    y.backward(y.detach().sin() / len(x))


def pipeline(model: Model, x: Tensor) -> None:
    """Run all micro-batches forward through both halves of a model, then all of them backward."""
    hidden = [model.module.blocks[0](row) for row in x.split(1)]
    cut = [h.detach().requires_grad_() for h in hidden]
    losses = [error(model.module.head(model.module.blocks[1](h)), len(x)) for h in cut]
    with model.accumulate():
        for loss, h, leaf in zip(losses, hidden, cut, strict=True):
            loss.backward()
            h.backward(leaf.grad)


def packed() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy)


def saved_by(saves: Callable[[], AbstractContextManager[Any]], module: nn.Module, x: Tensor) -> Tensor:
    with saves():
        return module(x)


class Fused(torch.autograd.Function):
    """A head and its loss in one function, which computes the output again in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return (h @ weight.t() - 0.5).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        y = h @ weight.t() - 0.5
        return grad * 2 / y.numel() * y @ weight, grad * 2 / y.numel() * y.t() @ h


def fused(m: nn.Module, x: Tensor) -> Tensor:
    return Fused.apply(m.body.encode(x), m.body.head.weight)


def checkpointed(reentrant: bool) -> nn.Module:
    return Calls(partial(checkpoint, use_reentrant=reentrant), adapted(), frozen(Block()), adapted())


def reference_after_policy(model: Model, x: Tensor) -> None:
    y, adapted_blocks = model(x), model.module.blocks[::2]
    for block in adapted_blocks:
        block.adapts = False
    with torch.no_grad():
        reference = model(x)
    for block in adapted_blocks:
        block.adapts = True
    (y - reference - 0.5).square().mean().backward()


def nested() -> nn.Module:
    """Return a model of checkpointed blocks, each with a unit inside it."""
    blocks = [With(lambda m, x: m.down(m.expert(x)), expert=Block(), down=nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return Calls(partial(checkpoint, use_reentrant=False), *blocks)


def in_threads(model: Model, x: Tensor) -> None:
    losses: list[Tensor] = []
    for target in (lambda: losses.append(mean_square(model, x)), lambda: losses[0].backward()):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()


def wait_for_gradients(run: Run) -> None:
    module, counts = Blocks(), []
    register_multi_grad_hook([*module.blocks.parameters()], lambda grads: counts.append(len(grads)))
    run.train_module(module)
    assert counts == [10, 10]


TABLE: Table = {
    "pytorch#144045, pytorch#132934: one element": trains(lambda: Blocks(scaled((1,), ()), scaled((), (1, 1)))),
    "ao#1269: fewer rows than ranks": trains(lambda: Blocks(scaled((1, WIDTH)), scaled((1, 1, 7)))),
    "DeepSpeed#8279: no elements": trains(with_empty_parameters),
    "DeepSpeed#8276: addresses": trains(lambda: Blocks(scaled((3,), (5,)), scaled((7, 3), (1,), (9,)))),
    "pytorch#137382: channels_last": trains(lambda: Blocks(convolution(), convolution())),
    "pytorch#167856: containers that are called": trains(containers),
    "pytorch#185239: integers": trains(lambda: Blocks(quantized(), quantized())),
    "accelerate#4171, torchtitan#2495: the head is the embedding": trains(language, partial(next_token, torch.ones(1))),
    "torchtitan#2881: a complex table": trains(language, partial(next_token, torch.tensor(0.6 + 0.8j))),
    "Megatron-LM#5789: forward is called": trains(
        lambda: Calls(lambda m, h: m.forward(h) + m.up.forward(h)[:, :4], Block())
    ),
    "transformers#45414: a child is not called": trains(
        lambda: Blocks(With(lambda m, x: m.up(x), up=Block(), off=Block()))
    ),
    "pytorch#129259: blocks without differentiable inputs": trains(queries),
    "pytorch#117510: a frozen block ignores an input": trains(ignores),
    "DeepSpeed#6870: the reference has no adapters": trains(lambda: Blocks(adapted(), adapted()), far_from_reference),
    "torchtitan#2937, torchtitan#4451, torchtitan#933: two outputs in chunks": trains_by(Blocks, predict_twice),
    "pytorch#180426: a part of a unit": trains_by(
        lambda: with_tail(lambda m, x: m.tail.norm(m.body.encode(x))),
        lambda model, x: in_chunks(model, [model(x)], model.module.tail.head),
        units=("body.blocks.*", "tail"),
    ),
    "pytorch#183702: a part of a unit runs again": trains_by(
        lambda: with_tail(keep_logits), with_logits, units=("body.blocks.*", "tail")
    ),
    "pytorch#174829: the loss of an activation": trains_by(
        Keeps, lambda model, x: (model(x), model.module.kept.square().mean().backward())
    ),
    "pytorch#181832: a view is changed": trains(
        lambda: Calls(add_to_view, Block(), With(lambda m, x: m.up(x)[None][0], up=Block()))
    ),
    "DeepSpeed#7665: backward of a gradient": trains_by(Blocks, with_gradient),
    "pytorch#136861: a pipeline": trains_by(Blocks, pipeline),
    "pytorch#174960: saved on the CPU": trains(lambda: Calls(partial(saved_by, save_on_cpu), Block(), Block())),
    "accelerate#4175: saved as arrays": trains(lambda: Calls(partial(saved_by, packed), Block(), Block())),
    "VeOmni#804, ml-cross-entropy#31: a fused head": trains(
        lambda: With(fused, body=Blocks()), lambda model, x: model(x)
    ),
    "DeepSpeed#8130: frozen and checkpointed": trains(lambda: checkpointed(True)),
    "DeepSpeed#8148: frozen and checkpointed": trains(lambda: checkpointed(False)),
    "pytorch#153354, trl#4550: the reference runs before the policy's backward": trains_by(
        lambda: checkpointed(False), reference_after_policy
    ),
    "pytorch#164009, VeOmni#1043: nested units are checkpointed": trains_by(
        nested, with_gradient, units=("blocks.*", "blocks.*.expert")
    ),
    "accelerate#4015, Automodel#3708: embedding and head are units": trains_by(
        lambda: With(fused, body=Blocks()),
        lambda model, x: model(x).backward(),
        units=("body.embed", "body.blocks.*", "body.head"),
    ),
    "DeepSpeed#7824: threads": trains_by(Blocks, in_threads),
    "torchrec#4268: a hook of several gradients": wait_for_gradients,
}

test_models_that_were_reported = as_one_test(__name__, TABLE)
