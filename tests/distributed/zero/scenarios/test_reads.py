"""Parameters that are read: by whatever route while nothing runs, by other modules in forward, and by losses."""

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.autograd_internals import DisableTorchFunction
from tests.scenarios import DEFAULT, HOST, STAGE_3, WIDTH, Block, Blocks, Model, Run, mean_square, scenario
from zero.buckets.guarded_parameter import ShardedParameterError

# What reads or writes the values of a parameter, given the model and a parameter of it that was kept in a list.
READS: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "attribute": lambda model, _: model.module.head.weight + 1,
    "arithmetic": lambda _, kept: 2 * kept,
    "torch function": lambda _, kept: torch.add(kept, 1),
    "functional": lambda _, kept: F.linear(torch.ones(1, WIDTH), kept),
    "nested argument": lambda _, kept: torch.cat([torch.ones(1, WIDTH), kept]),
    "loss": lambda _, kept: kept.square().sum(),
    "norm": lambda _, kept: torch.linalg.vector_norm(kept),
    "state_dict of the module": lambda model, _: [value + 1 for value in model.module.state_dict().values()],
    "deepcopy": lambda model, _: copy.deepcopy(model.module),
    "deepcopy of a parameter": lambda _, kept: copy.deepcopy(kept),
    "save": lambda model, _: torch.save(model.module, io.BytesIO()),
    "save of a parameter": lambda _, kept: torch.save(kept, io.BytesIO()),
    "pickle": lambda _, kept: pickle.dumps(kept),
    "numpy": lambda _, kept: kept.detach().numpy(),
    "asarray": lambda _, kept: np.asarray(kept),
    "tolist": lambda _, kept: kept.tolist(),
    "item": lambda _, kept: kept[0, 0].item(),
    "iteration": lambda _, kept: list(kept),
    "index": lambda _, kept: kept[0],
    "view": lambda _, kept: kept.view(-1),
    "data": lambda _, kept: kept.data + 1,
    "data, then a copy": lambda _, kept: kept.data.clone(),
    "detach": lambda _, kept: kept.detach() + 1,
    "clone": lambda _, kept: kept.clone(),
    "cast": lambda _, kept: kept.to(torch.float32),
    "comparison": lambda _, kept: kept == 1,
    "equal": lambda _, kept: torch.equal(kept, kept),
    "source of a copy": lambda _, kept: torch.zeros(kept.shape).copy_(kept),
    "parameters_to_vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
    "isnan": lambda _, kept: kept.isnan().any(),
}
WRITES: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "in place": lambda _, kept: kept.mul_(2),
    "fill": lambda _, kept: kept.fill_(1.0),
    "zero": lambda _, kept: kept.zero_(),
    "data, in place": lambda _, kept: kept.data.mul_(2),
    "data, zero": lambda _, kept: kept.data.zero_(),
    "data, replaced": lambda _, kept: setattr(kept, "data", torch.ones(kept.shape)),
    "out": lambda _, kept: torch.add(torch.ones(()), 1, out=kept),
    "init": lambda model, _: nn.init.ones_(model.module.head.weight),
    "reset_parameters": lambda model, _: model.module.head.reset_parameters(),
    "vector_to_parameters": lambda model, _: nn.utils.vector_to_parameters(torch.ones(1000), model.parameters()),
}


def accepted(routes: dict[str, Callable], model: nn.Module, param: nn.Parameter) -> list[str]:
    """Return the names of the routes that do not raise the error that says what to do."""
    names = []
    for name, route in routes.items():
        try:
            route(model, param)
        except ShardedParameterError as error:
            if "gathered" in str(error):
                continue
        except Exception as error:
            name = f"{name}: {error}"
        names.append(name)
    return names


@scenario(STAGE_3)
def test_a_read_of_a_sharded_parameter_raises_by_every_route(run: Run) -> None:
    model = run.wrap(Blocks())
    kept = [model.module.head.weight, model.module.blocks[0].up.weight]
    optimizer = run.optimizer(model)
    for step in range(2):
        for param in () if run.is_plain else kept:
            names = accepted(READS, model, param)
            assert not names, names
        run.train(model, optimizer, steps=[step])


@scenario(STAGE_3)
def test_a_write_to_a_sharded_parameter_raises_by_every_route(run: Run) -> None:
    model = run.wrap(Blocks())
    kept, optimizer = model.module.head.weight, run.optimizer(model)
    for step in range(2):
        if not run.is_plain:
            with torch.no_grad():
                names = accepted(WRITES, model, kept)
            assert not names, names
        run.train(model, optimizer, steps=[step])


@scenario()
def test_metadata_can_always_be_read(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        weight, module = model.module.blocks[0].up.weight, model.module
        assert weight.shape == weight.size() == (WIDTH + 2, WIDTH)
        assert (weight.size(0), weight.shape[1], len(weight)) == (WIDTH + 2, WIDTH, WIDTH + 2)
        assert (weight.dim(), weight.ndim, weight.ndimension()) == (2, 2, 2)
        assert weight.numel() == weight.nelement() == torch.numel(weight) == (WIDTH + 2) * WIDTH
        assert (weight.dtype, weight.device, weight.layout) == (torch.float64, torch.device("cpu"), torch.strided)
        assert (weight.itemsize, weight.element_size()) == (8, 8)
        assert weight.is_floating_point()
        assert torch.is_floating_point(weight)
        assert not weight.is_complex()
        assert not weight.is_cuda
        assert not weight.is_sparse
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight.grad_fn is None
        assert weight.grad is None or run.is_plain
        assert isinstance(weight, nn.Parameter)
        assert torch.is_tensor(weight)
        assert weight in {weight: 1}
        assert weight is dict(module.named_parameters())["blocks.0.up.weight"]
        assert all(text for text in (repr(weight), str(weight), f"{weight}", repr(module)))
        assert sum(param.numel() for param in model.parameters()) == 154
        assert torch.empty_like(weight).shape == torch.zeros_like(weight).shape == weight.shape
        assert weight.new_zeros(3).dtype == torch.float64
        run.train(model, optimizer, steps=[step])


class KeepsWeights(nn.Module):
    """A model that reads its blocks' weights from a plain list, a dictionary and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weights = [block.weight for block in self.blocks]
        self.biases = {"last": self.blocks[2].bias}
        weight = self.blocks[1].weight
        self.product = lambda x: x @ weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.product(x) + x @ self.weights[0] + self.weights[2].square().sum() * self.biases["last"]


@scenario(DEFAULT + HOST)
def test_weights_kept_in_a_list_are_read_in_forward(run: Run) -> None:
    run.train_module(KeepsWeights(), steps=range(3))


class ReadsNeighbours(nn.Module):
    """A block that reads weights of a child, and of a block that it does not own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.child, self.others = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.child.weight) + x @ self.others[0].up.weight.t() @ self.others[0].down.weight.t()


@scenario()
def test_weights_of_children_and_of_other_blocks_are_read_in_forward(run: Run) -> None:
    first = Block()
    run.train_module(Blocks(first, ReadsNeighbours(first), ReadsNeighbours(first)), steps=range(3))


class ReadsUnseen(ReadsNeighbours):
    """A block whose operations torch shows to no subclass of a tensor, as those of an extension in C++."""

    def forward(self, x: Tensor) -> Tensor:
        with DisableTorchFunction():
            return super().forward(x)


@scenario()
def test_weights_of_other_blocks_are_read_in_forward_by_an_extension(run: Run) -> None:
    first = Block()
    run.train_module(Blocks(first, ReadsUnseen(first), ReadsUnseen(first)), steps=range(3))


class ReturnsParameters(nn.Module):
    """A block that returns a parameter and views of parameters, for its caller to use."""

    def __init__(self, is_root: bool = False) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.linear.weight
        return self.linear(x), self.bias, weight[0], weight.t(), self.frozen, self.frozen[1:]


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsParameters() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        biases = []
        for block in self.blocks:
            x, bias, row, transposed, frozen, part = block(x)
            biases.append((bias, row, frozen, part))
            x = (x @ transposed).tanh()
        return sum((b * x + r.sin() * f + p.sum() for b, r, f, p in biases), x)


@scenario()
def test_parameters_and_views_of_them_are_outputs_of_blocks(run: Run) -> None:
    run.train_module(UsesReturned(), steps=range(3))


@scenario()
def test_parameters_and_views_of_them_are_outputs_of_the_model(run: Run) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        y, bias, row, transposed, frozen, part = model(x)
        return ((y + bias * row + part.sum()) @ transposed * frozen).square().mean()

    run.train_module(ReturnsParameters(), loss)


def penalty(module: nn.Module) -> Tensor:
    return sum(param.square().sum() for param in module.parameters()) * 0.1


@scenario()
def test_a_regulariser_has_a_backward_of_its_own(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        with model.accumulate():
            run.record(mean_square(model, run.batch(step))).backward()
        with model.gathered() as module:
            value = penalty(module)
        run.record(value).backward()
        optimizer.step()


@scenario(STAGE_3)
def test_a_read_inside_gathered_and_used_after_another_step_raises(run: Run) -> None:
    """The values of a parameter that leave `gathered` belong to this step."""
    model, optimizer = run.start(Blocks())
    with model.gathered() as module:
        values = penalty(module)
    run.train(model, optimizer)
    with pytest.raises(RuntimeError):
        values.backward()
    optimizer.zero_grad()
    run.train(model, optimizer, steps=[2])
