"""Modules of torch that read weights in their own ways, parametrizations, functional calls, and kinds of parameters."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from tests.procedures import With, linear, param, trains, trains_parts
from tests.scenarios import WIDTH, Block, Blocks, Model, Run, as_test, cases, mean_square


def as_sequence(inner: nn.Module, x: Tensor) -> Tensor:
    """Call a recurrent module: (rows, width) -> (rows, sequence=2, width) -> (rows, width)."""
    output = inner(torch.stack([x, x.sin()], dim=1))
    output = output[0] if isinstance(output, tuple) else output
    return output[:, -1, :WIDTH]


def attend(inner: nn.Module, x: Tensor) -> Tensor:
    sequence = torch.stack([x, x.sin()], dim=1)
    return inner(sequence, sequence.cos(), sequence, need_weights=False)[0].sum(1)


def translate(inner: nn.Module, x: Tensor) -> Tensor:
    sequence = torch.stack([x, x.sin()], dim=1)
    return inner(sequence, sequence.cos()).sum(1)


def plain(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x)


TRANSFORMER = {"dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(WIDTH, 6, proj_size=WIDTH, num_layers=2, batch_first=True), as_sequence),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), as_sequence),
    "MultiheadAttention, own keys": (
        lambda: nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True),
        attend,
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, **TRANSFORMER), 2),
        as_sequence,
    ),
    "Transformer": (
        lambda: nn.Transformer(WIDTH, 2, num_encoder_layers=1, num_decoder_layers=2, **TRANSFORMER),
        translate,
    ),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: inner(x, x.cos())),
    "ParameterList": (
        lambda: nn.ParameterList(torch.randn(WIDTH) for _ in range(3)),
        lambda inner, x: sum(x * weight for weight in inner) + inner[0] * inner[-1],
    ),
    "ParameterDict": (
        lambda: nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)}),
        lambda inner, x: x * inner["a"] + sum(weight for _, weight in inner.items()),
    ),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), plain),
    "weight_norm, by hooks": (lambda: nn.utils.weight_norm(linear()), plain),
    "orthogonal": (lambda: parametrizations.orthogonal(linear()), plain),
    "spectral_norm, by hooks": (lambda: nn.utils.spectral_norm(linear()), plain),
    "pruned": (lambda: prune.l1_unstructured(linear(), "weight", amount=0.5), plain),
}


def zoo(container: Callable[[dict[str, nn.Module]], nn.Module]) -> nn.Module:
    """Return a model that contains each of `MODULES`."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for block in m.blocks.values() if isinstance(m.blocks, nn.ModuleDict) else m.blocks:
            x = x + block(x).tanh()
        return x

    parts = {
        name: With(lambda m, x: m.apply_to(m.inner, x), inner=make(), apply_to=call)
        for name, (make, call) in MODULES.items()
    }
    return With(forward, blocks=container(parts))


def every_module_of_torch(run: Run) -> None:
    """Without gradients, some take another path, which hands all weights to one kernel."""
    for container in (nn.ModuleDict, lambda parts: nn.ModuleList(parts.values())):  # in the root, and as units
        model, optimizer = run.start(zoo(container), lr=0.01)
        for step, context in enumerate((torch.no_grad, torch.inference_mode)):
            model.eval()
            with context():
                value = mean_square(model, run.batch(9)).clone()
            run.record(value)
            model.train()
            run.train(model, optimizer, steps=[step])


def with_batch_norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.ReLU())


def batch_norms(run: Run) -> None:
    """The statistics are those of a rank's own rows, as in DistributedDataParallel; in one process, of each part."""
    module = Blocks(with_batch_norm(), with_batch_norm())
    trains_parts(lambda: module, lambda model, x, _rank: mean_square(model, x))(run)
    assert module.blocks[0][1].num_batches_tracked == 3 * len(run.parts(0))


def cached_parametrizations(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        with parametrize.cached():
            return mean_square(model, x) + mean_square(model, x.sin())

    blocks = Block(), Block()
    for block in blocks:
        parametrizations.weight_norm(block.up)
        parametrizations.orthogonal(block.down)
    run.train_module(Blocks(*blocks), loss)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def a_parametrized_weight_that_a_regulariser_reads(run: Run) -> None:
    """One is parametrized before wrapping, and another one after it."""

    def loss(model: Model, x: Tensor) -> Tensor:
        error = mean_square(model, x)
        with model.gathered() as module:
            return error + module.blocks[0].weight.square().sum()

    blocks = linear(), linear()
    parametrize.register_parametrization(blocks[0], "weight", Symmetric())
    model, optimizer = run.start(Blocks(*blocks))
    run.train(model, optimizer, loss)
    with model.gathered() as module:
        parametrize.register_parametrization(module.blocks[1], "weight", Symmetric())
    run.train(model, optimizer, loss, steps=[2, 3])


def a_context_of_another_device(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(3):
        x = run.batch(step)
        with torch.device("meta"):
            loss = mean_square(model, x)
            loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()


def replaced_parameters(model: Model, x: Tensor) -> Tensor:
    """Return the loss of a hypernetwork: the model trains, and some of its weights are computed from others."""
    with model.gathered([model.module.embed.weight]) as module:
        computed = {"head.weight": module.embed.weight[:2].sin(), "blocks.0.scale": module.embed.weight[2] * 2}
    return (functional_call(model.module, computed, x) - 0.5).square().mean()


def steps_in_the_loss(model: Model, x: Tensor, _rank: int) -> Tensor:
    """Return a loss with a step inside, through which the gradient flows (MAML), of a rank's own rows."""
    with model.gathered() as module:
        params = dict(module.named_parameters())
        error = (functional_call(module, params, x) - 0.5).square().mean()
        grads = torch.autograd.grad(error, list(params.values()), create_graph=True)
        adapted = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
        return (functional_call(module, adapted, x.sin()) - 0.5).square().mean()


def tied_and_shared() -> nn.Module:
    first, second, third = Block(), Block(), Block()
    second.up.weight = first.up.weight  # tied across two units
    third.down = first.down  # a shared submodule
    return Blocks(first, second, third, first)  # and a block that occurs twice


def scaled(*shapes: tuple[int, ...]) -> nn.Module:
    """Return a block whose parameters have these shapes; kernels need addresses that are multiples of 16 bytes."""

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        assert all(scale.data_ptr() % 16 == 0 for scale in block.scales)
        return x + sum((x * scale.mean()).tanh() for scale in block.scales if scale.numel())

    return With(forward, scales=nn.ParameterList(param(*shape) for shape in shapes))


def convolution() -> nn.Module:
    conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
    return With(lambda m, x: x + m.conv(x.view(-1, 2, 2, 1)).reshape(x.shape), conv=conv)


def with_frozen_types() -> nn.Module:
    codes = nn.Parameter(torch.randint(0, 9, (WIDTH, WIDTH), dtype=torch.uint8), requires_grad=False)
    low = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16), requires_grad=False)
    return With(
        lambda m, x: m.block(x) + x * m.low @ (m.codes.to(x.dtype) - 4) / 8, block=Block(), codes=codes, low=low
    )


def queries() -> nn.Module:
    """Return a model whose first block has no input, and the second one integers."""
    blocks = With(lambda m: m.query, query=param(WIDTH)), nn.Embedding(7, WIDTH, padding_idx=0), Block()
    return With(
        lambda m, x: m.blocks[2](m.blocks[0]() + m.blocks[1]((5 * x).long() % 7).sum(1)), blocks=nn.ModuleList(blocks)
    )


def ignoring() -> nn.Module:
    """Return a model with a frozen block that does not use an input which needs a gradient."""
    middle = With(lambda m, x, _ignored: m.block(x), block=Block().requires_grad_(False))

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.blocks[0](x)
        return m.blocks[1](h.detach().cos(), h) + h

    return With(forward, blocks=nn.ModuleList([Block(), middle]))


TABLE = {
    "modules": cases(every_module_of_torch, cached_parametrizations, a_parametrized_weight_that_a_regulariser_reads)
    | cases(
        batch_norms,
        a_context_of_another_device,
        {
            "a functional call with computed parameters": trains(Blocks, loss=replaced_parameters),
            "a functional call with all parameters": trains_parts(Blocks, steps_in_the_loss),
        },
    ),
    "parameters": cases(
        {
            "tied and shared": trains(tied_and_shared),
            "pytorch#144045, ao#1269, DeepSpeed#8276, DeepSpeed#8279: shapes": trains(
                lambda: Blocks(scaled((1,), ()), scaled((), (1, WIDTH)), scaled((3,), (1, 1, 7)), scaled((7, 3), (1,))),
                lambda: Blocks(scaled((0,), (2,)), scaled((5,), (4, 0))),
            ),
            "pytorch#137382, pytorch#185239, Model-Optimizer#2152: layouts and types": trains(
                lambda: Blocks(convolution(), with_frozen_types())
            ),
            "pytorch#129259, pytorch#117510: blocks without differentiable inputs": trains(queries, ignoring),
        }
    ),
}

test_scenario = as_test(__name__, TABLE)
