"""Modules of torch that read weights in their own ways: fused cells, fast paths, parametrizations, functional calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from tests.scenarios import FIRST_AND_LAST, STAGES, WIDTH, Block, Blocks, Model, Run, mean_square, scenario


class Applies(nn.Module):
    """A block that calls a module by a function, on (rows, width)."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


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


def convolve(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x.unsqueeze(1)).flatten(1)[:, :WIDTH]


def embed(inner: nn.Module, x: Tensor) -> Tensor:
    return x * inner((x[:, 0] > 0).long())


def bilinear(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x, x.cos())


TRANSFORMER = {"dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), as_sequence),
    "LSTM, projected": (lambda: nn.LSTM(WIDTH, 6, proj_size=WIDTH, batch_first=True), as_sequence),
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), as_sequence),
    "RNN": (lambda: nn.RNN(WIDTH, WIDTH, batch_first=True), as_sequence),
    "LSTMCell": (lambda: nn.LSTMCell(WIDTH, WIDTH), lambda inner, x: sum(inner(x))),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend),
    "MultiheadAttention, own keys": (
        lambda: nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True),
        attend,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, **TRANSFORMER), as_sequence),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, **TRANSFORMER), 2),
        as_sequence,
    ),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, **TRANSFORMER), 2),
        translate,
    ),
    "Transformer": (
        lambda: nn.Transformer(WIDTH, 2, num_encoder_layers=1, num_decoder_layers=2, **TRANSFORMER),
        translate,
    ),
    "Conv1d": (lambda: nn.Conv1d(1, 2, 3, padding=1), convolve),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(1, 2, 3), convolve),
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), plain),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), plain),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), plain),
    "PReLU": (lambda: nn.PReLU(WIDTH), plain),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), bilinear),
    "Embedding": (lambda: nn.Embedding(2, WIDTH), embed),
    "ParameterList": (
        lambda: nn.ParameterList(torch.randn(WIDTH) for _ in range(3)),
        lambda inner, x: sum(x * weight for weight in inner) + inner[0] * inner[-1],
    ),
    "ParameterDict": (
        lambda: nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)}),
        lambda inner, x: x * inner["a"] + sum(weight for _, weight in inner.items()),
    ),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "weight_norm, by hooks": (lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), plain),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "spectral_norm, by hooks": (lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), plain),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.5), plain),
}


class Zoo(nn.Module):
    """A model that contains each of `MODULES`, as units or in the root."""

    def __init__(self, are_units: bool) -> None:
        super().__init__()
        parts = {name: Applies(make(), call) for name, (make, call) in MODULES.items()}
        self.blocks = nn.ModuleList(parts.values()) if are_units else nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = x + block(x).tanh()
        return x


@scenario(FIRST_AND_LAST)
def test_every_module_of_torch_trains_in_the_root(run: Run) -> None:
    model = run.wrap(Zoo(are_units=False))
    run.train(model, run.optimizer(model, lr=0.01))


@scenario(STAGES)
def test_every_module_of_torch_trains_as_a_unit_and_is_evaluated_between_steps(run: Run) -> None:
    """Without gradients, some take another path, which hands all weights to one kernel."""
    model = run.wrap(Zoo(are_units=True))
    optimizer = run.optimizer(model, lr=0.01)
    for step, context in enumerate((torch.no_grad, torch.inference_mode)):
        model.eval()
        with context():
            value = mean_square(model, run.batch(9)).clone()
        run.record(value)
        model.train()
        run.train(model, optimizer, steps=[step])


@scenario()
def test_batch_norms_train_on_each_ranks_rows(run: Run) -> None:
    """The statistics are those of a rank's own rows, as in DistributedDataParallel; in one process, of each part."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())

    model, optimizer = run.start(Blocks(block(), block()))
    run.train_by_parts(model, optimizer, mean_square, num_steps=3)
    assert model.module.blocks[0][1].num_batches_tracked == 3 * len(run.parts(0))


@scenario()
def test_a_parametrization_is_cached_and_its_original_is_read(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        with parametrize.cached():
            return mean_square(model, x) + mean_square(model, x.sin())

    def block() -> nn.Module:
        block = Block()
        parametrizations.weight_norm(block.up)
        parametrizations.orthogonal(block.down)
        return block

    run.train_module(Blocks(block(), block()), loss)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


@scenario()
def test_a_regulariser_reads_a_parametrized_weight(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        error = mean_square(model, x)
        with model.gathered() as module:
            return error + module.blocks[0].weight.square().sum()

    blocks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    for linear in blocks:
        parametrize.register_parametrization(linear, "weight", Symmetric())
    run.train_module(Blocks(*blocks), loss)


@scenario()
def test_a_weight_is_parametrized_after_wrapping(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    run.train(model, optimizer)
    with model.gathered() as module:
        parametrize.register_parametrization(module.embed, "weight", Symmetric())
    run.train(model, optimizer, steps=[2, 3])


@scenario()
def test_a_model_runs_inside_a_context_of_another_device(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(3):
        x = run.batch(step)
        with torch.device("meta"):
            loss = mean_square(model, x)
            loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def test_a_functional_call_replaces_parameters(run: Run) -> None:
    """A hypernetwork: the model trains, and some of its weights are computed from others."""

    def loss(model: Model, x: Tensor) -> Tensor:
        with model.gathered([model.module.embed.weight]) as module:
            computed = {"head.weight": module.embed.weight[:2].sin(), "blocks.0.scale": module.embed.weight[2] * 2}
        return (functional_call(model.module, computed, x) - 0.5).square().mean()

    run.train_module(Blocks(), loss, steps=range(3))


@scenario()
def test_a_functional_call_replaces_all_parameters(run: Run) -> None:
    """Steps inside the loss, through which the gradient flows (MAML): its backward reaches the model's parameters."""

    def loss(model: Model, x: Tensor) -> Tensor:
        with model.gathered() as module:
            params = dict(module.named_parameters())
            error = (functional_call(module, params, x) - 0.5).square().mean()
            grads = torch.autograd.grad(error, list(params.values()), create_graph=True)
            adapted = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
            return (functional_call(module, adapted, x.sin()) - 0.5).square().mean()

    run.train_by_parts(*run.start(Blocks()), loss, num_steps=3)  # the inner gradient is that of a rank's own rows


@scenario()
def test_a_functional_call_evaluates_other_values(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    torch.manual_seed(5)
    values = Blocks().state_dict()
    for step in range(2):
        with torch.no_grad():
            run.record((functional_call(model.module, values, run.batch(9)) - 0.5).square().mean())
        run.train(model, optimizer, steps=[step])


@scenario(STAGES)
def test_gradients_of_each_row_are_computed_by_torch_func(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        with torch.no_grad(), model.gathered() as module:
            params = {name: param.detach().clone() for name, param in module.named_parameters()}

            def row_loss(values: dict[str, Tensor], row: Tensor, module: nn.Module = module) -> Tensor:
                return functional_call(module, values, row[None]).square().mean()

            grads = torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0))(params, run.batch(step))
        run.record(sum(grad.square().flatten(1).sum(1).mean() for grad in grads.values()))
        run.train(model, optimizer, steps=[step])


@scenario(STAGES)
def test_a_synchronized_batch_norm_needs_a_gpu_as_in_torch(run: Run) -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    model = run.wrap(module)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        mean_square(model, run.batch(0))
    model.eval()
    run.train(model, run.optimizer(model))
