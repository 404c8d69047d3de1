"""Tensor-parallel layers and initial values against the whole computation on one rank."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from parallel.tensor import gradient_sums, initial_values
from parallel.tensor.gradient_sums import GradientSums
from parallel.tensor.initial_values import fill_normal
from parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SplitLinear, VocabParallelEmbedding
from parallel.tensor.split_parameters import split_dims
from parallel.tensor.token_layout import ReplicatedTokens, SplitTokens, TokenLayout
from parallel.validation.errors import ConfigError
from tests.ranks import run_cases, run_ranks
from zero.fp8 import convert
from zero.fp8.scaling import RecipeName

LAYOUTS = {"replicated": ReplicatedTokens, "split": SplitTokens}


def tensor_axis() -> Axis:
    torch.set_default_dtype(torch.float64)
    return Mesh.create(torch.distributed.get_world_size()).tensor


def gradients_of_a_shared_parameter() -> tuple[float, float, list[float]]:
    """Return the gradient, the one that is left for later, and gradients that are summed at once."""
    axis = tensor_axis()
    shared = nn.Parameter(torch.ones(1))
    sums = GradientSums([shared], axis)
    (summed,) = torch.autograd.grad(shared * axis.rank, shared)
    sums.is_deferred = True
    (own,) = torch.autograd.grad(shared * axis.rank, shared)
    at_once = [torch.full((1,), float(axis.rank)), torch.full((2,), 2.0 * axis.rank)]
    with mock.patch.object(gradient_sums, "MESSAGE_NUMEL", 2):  # two messages
        sums.sum_at_once(at_once)
    return summed.item(), own.item(), torch.cat(at_once).tolist()


def test_gradients_of_shared_parameters_are_summed_in_backward_or_at_once():
    for rank, found in enumerate(run_ranks(3, gradients_of_a_shared_parameter)):
        assert found == (3.0, rank, [3.0, 6.0, 6.0])


HIDDEN = 256  # parts of two ranks are whole blocks of 128: their scales are those of the whole layers


def whole_layers(recipe: RecipeName | None) -> nn.ModuleList:
    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Embedding(32, 16), nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 16)])
    if recipe is not None:
        convert(layers, recipe)
    return layers


def run_whole(ids: Tensor, recipe: RecipeName | None) -> tuple[Tensor, list[Tensor]]:
    torch.set_default_dtype(torch.float64)
    embedding, column, row = whole_layers(recipe)
    output = row(F.gelu(column(embedding(ids))))
    output.square().sum().backward()
    return output.detach(), [p.grad for layer in (embedding, column, row) for p in layer.parameters()]


def run_split(layout: str, ids: Tensor, recipe: RecipeName | None) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
    """Return (output of this rank's tokens, gradients, dims along which parameters are split)."""
    axis = tensor_axis()
    tokens: TokenLayout = LAYOUTS[layout](axis)
    layers = nn.ModuleList(
        [
            VocabParallelEmbedding(32, 16, tokens),
            ColumnParallelLinear(16, HIDDEN, tokens),
            RowParallelLinear(HIDDEN, 16, tokens),
        ]
    )
    if recipe is not None:
        convert(layers, recipe)
    dims = split_dims(layers)
    for number, whole in enumerate(whole_layers(recipe)):
        for name, param in whole.named_parameters():
            own = layers.get_parameter(f"{number}.{name}")
            dim = dims.get(f"{number}.{name}")
            own.data.copy_(param if dim is None else param.chunk(axis.size, dim)[axis.rank])
    embedding, column, row = layers
    output = row(F.gelu(column(embedding(ids))))
    output.square().sum().backward()
    return output.detach(), {name: param.grad for name, param in layers.named_parameters()}, dims


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tensor_size", "recipe"), [(1, None), (2, None), (2, "blockwise")])
def test_layers_equal_the_whole_ones(layout, tensor_size, recipe):
    ids = torch.randint(32, (12,))
    expected_output, expected_grads = run_whole(ids, recipe)
    results = run_ranks(tensor_size, run_split, layout, ids, recipe)
    outputs = [output for output, _, _ in results]
    output = torch.cat(outputs) if layout == "split" else outputs[0]
    torch.testing.assert_close(output, expected_output, rtol=0, atol=1e-12)
    _, grads, dims = results[0]
    for name, expected in zip(grads, expected_grads, strict=True):
        parts = [result[1][name] for result in results]
        if name in dims:
            found = torch.cat(parts, dims[name])
        else:
            found = parts[0]
            assert all(part.equal(found) for part in parts), name
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def several_layers() -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return an input of 12 tokens, the weights and biases of three layers, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(1)
    x, *others = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in [(12, 16), *((rows, 16) for rows in (8, 4, 12)), (8,), (4,), (12,), (12, 8), (12, 4), (12, 12)]
    )
    return x, others[:3], others[3:6], others[6:]


def run_several(layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of three layers of one input, and the gradients of the input, the weights and the biases."""
    axis = tensor_axis()
    x, weights, biases, grads = several_layers()
    own = [[part.chunk(axis.size)[axis.rank] for part in parts] for parts in (weights, biases)]
    own_x = x.chunk(axis.size)[axis.rank] if layout == "split" else x
    outputs = SplitLinear(LAYOUTS[layout](axis)).columns(own_x, *own)
    own_grads = [grad.chunk(axis.size, -1)[axis.rank] for grad in grads]
    found = torch.autograd.grad(outputs, [own_x, *own[0], *own[1]], own_grads)
    return [output.detach() for output in outputs], list(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_layers_of_one_input_equal_the_whole_ones(layout):
    x, weights, biases, grads = several_layers()
    expected = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    grad_x, *grads_of_params = torch.autograd.grad(expected, [x, *weights, *biases], grads)
    results = run_ranks(2, run_several, layout)
    for number, whole in enumerate(expected):
        found = torch.cat([outputs[number] for outputs, _ in results], -1)
        torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-12)
    of_x = [found[0] for _, found in results]
    torch.testing.assert_close(torch.cat(of_x) if layout == "split" else of_x[-1], grad_x, rtol=0, atol=1e-12)
    for number, whole in enumerate(grads_of_params, 1):
        torch.testing.assert_close(torch.cat([found[number] for _, found in results]), whole, rtol=0, atol=1e-12)


def initial_part(dim: int | None, tensor_size: int) -> tuple[Tensor, list[int]]:
    """Return (this rank's part of a parameter, the numbers of values that it drew at a time)."""
    mesh, shape = Mesh.create(tensor_size), [48, 40]
    if dim is not None:
        shape[dim] //= tensor_size
    part, drawn, draw = torch.empty(shape), [], initial_values.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_values, "draw", lambda shape, *rest: drawn.append(shape.numel()) or draw(shape, *rest))
        fill_normal(part, 0.5, "7/name", dim, mesh.tensor, mesh.data)
    return part, drawn


def test_initial_values_are_the_same_in_every_mesh_whose_data_ranks_share_the_work():
    dims = [0, 1, None]
    wholes = [found[0][0] for found in run_cases(1, initial_part, [(dim, 1) for dim in dims])]
    for whole in wholes:
        assert whole.std().item() == pytest.approx(0.5, rel=0.1)
        assert whole.unique().numel() == whole.numel()
    for tensor_size, data_size in ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2)):
        cases = [(dim, tensor_size) for dim in dims]
        for dim, whole, found in zip(
            dims, wholes, run_cases(tensor_size * data_size, initial_part, cases), strict=True
        ):
            for rank, (part, drawn) in enumerate(found):
                assert part.equal(whole if dim is None else whole.chunk(tensor_size, dim)[rank % tensor_size])
                assert max(drawn) <= part.numel()
                if dim is not None:
                    assert sum(drawn) <= part.numel() / data_size + 2 * max(drawn), "it begins and ends inside a cell"


def test_a_tensor_axis_that_does_not_divide_the_cells_of_values_is_refused():
    axis = Axis("tensor", 7, 0, CommLog())
    with pytest.raises(ConfigError, match=r"tensor_size=7 does not divide the 1 cells .* choose a tensor size"):
        fill_normal(torch.empty(11, 4), 0.5, "name", 0, axis, Axis.trivial("data"))


def tiny_part() -> Tensor:
    mesh, part = Mesh.create(1), torch.empty(1, 5)
    fill_normal(part, 0.5, "7/name", 0, mesh.tensor, mesh.data)
    return part


def test_more_ranks_than_a_parameter_has_stretches_share_it_too():
    (alone,) = run_ranks(1, tiny_part)
    assert all(part.equal(alone) for part in run_ranks(4, tiny_part))  # 2 + 2 + 1 + 0 elements
