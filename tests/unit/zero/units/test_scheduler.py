"""Units that stay unsharded, and the time of reductions, on one rank: after failures, and in backwards inside others.

Reductions do not overlap: a bucket that has been reduced holds its gradient at once.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.mesh import Axis
from zero.core.units.passes import is_in_backward
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

WIDTH = 4
ONE_AT_A_TIME = ZeroConfig(3, 500, overlap=False, prefetch_numel=0)


class Returns(nn.Module):
    """A layer that returns what `function` returns, given the layer's weight and its input."""

    def __init__(self, function: Callable[[Tensor, Tensor], object]):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(WIDTH, WIDTH)), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.weight, x)


class Chain(nn.Module):
    """Layers, each of which is a unit; a function that one returns is called at once."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers or (nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x() if callable(x) else x
        return x


def wrapped(module: nn.Module) -> ZeroDataParallel:
    return ZeroDataParallel(module, Axis.trivial("data"), ONE_AT_A_TIME)


def unsharded(model: ZeroDataParallel) -> list[str]:
    """Return the names of parameters whose full buffers are allocated, without their last part."""
    names = {flat.layout.spans[0].name for flat in model.flats if not flat.is_sharded}
    return sorted(name.rpartition(".")[0] for name in names)


def reduced(model: ZeroDataParallel) -> list[bool]:
    return [bucket.grads.total.has_sum for bucket in model.buckets]


def test_a_layer_that_returns_a_function_stays_unsharded_until_the_step_or_the_next_forward():
    model = wrapped(Chain(nn.Linear(WIDTH, WIDTH), Returns(lambda weight, x: lambda: x @ weight)))
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            assert unsharded(model) == ["layers.1"]
            model.module.layers[0](torch.ones(1, WIDTH))
            assert unsharded(model) == []
        model(torch.ones(1, WIDTH)).sum().backward()
        with torch.no_grad():
            model.module.layers[0](torch.ones(1, WIDTH))
        assert unsharded(model) == ["layers.1"]
        model.before_step(())
        assert unsharded(model) == []
        model.reducer.clear()


def test_a_backward_after_one_that_failed_unshards_one_unit_at_a_time():
    model, found = wrapped(Chain()), []

    def fail(_grad: Tensor) -> None:
        raise KeyError

    def output(fails: bool) -> Tensor:
        first, second, third = model.module.layers
        hidden = first(torch.ones(1, WIDTH))
        hidden.register_hook(lambda _grad: found.append(unsharded(model)))
        hidden = second(hidden)
        if fails:
            hidden.register_hook(fail)
        return third(hidden).sum()

    with pytest.raises(KeyError):
        output(fails=True).backward()
    model.reducer.clear()
    output(fails=False).backward()
    assert found == [["layers.0"]]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_training_after_an_exception_is_undisturbed(where: str, error: type[BaseException]):
    raises: list[str] = []

    def middle(weight: Tensor, x: Tensor) -> Tensor:
        y = x @ weight
        y.register_hook(lambda _grad: fail("backward"))
        fail("recomputation" if is_in_backward() else "forward")
        return y

    def fail(here: str) -> None:
        if here in raises:
            raise error

    def losses(disturbs: bool) -> list[float]:
        torch.manual_seed(0)
        model = wrapped(Chain(nn.Linear(WIDTH, WIDTH), Returns(middle), nn.Linear(WIDTH, WIDTH)))
        optimizer, found = ZeroOptimizer(model, torch.optim.SGD, lr=1e-3), []
        for step in range(4):
            if disturbs and step == 1:
                raises.append(where)
                with pytest.raises(error):
                    loss_of(model).backward()
                raises.clear()
                if where == "forward":  # which leaves no gradients
                    with model.loading_masters():  # the units that were running are sharded by it
                        pass
                else:
                    optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert unsharded(model) == []
        return found

    def loss_of(model: ZeroDataParallel) -> Tensor:
        return checkpoint(model, torch.ones(1, WIDTH, requires_grad=True), use_reentrant=False).sum()

    assert losses(disturbs=True) == losses(disturbs=False)


def test_a_derivative_by_the_input_delays_no_reduction():
    model, found = wrapped(Chain()), []
    for _ in range(2):
        x = torch.ones(1, WIDTH, requires_grad=True)
        x.register_hook(lambda _grad: found.append(reduced(model)))
        y = model(x * 1).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        assert reduced(model) == [False] * 3
        y.backward()
        assert reduced(model) == [True] * 3
        model.reducer.clear()
    assert found == [[False] * 3, [True] * 3] * 2


def test_gradients_that_all_arrive_inside_checkpoints_are_reduced_in_backward():
    class Checkpointed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True) * 1

    model = wrapped(Checkpointed())
    for _ in range(2):
        model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        assert reduced(model) == [True] * 3
        model.reducer.clear()


def test_the_end_of_accumulation_ends_a_backward_of_which_only_a_checkpoint_is_seen():
    model = wrapped(Chain())
    with model.accumulate():
        checkpoint(model, torch.ones(1, WIDTH, requires_grad=True), use_reentrant=True).sum().backward()
        assert reduced(model) == [False] * 3
    assert reduced(model) == [True] * 3


def test_reads_and_writes_are_noticed_until_the_last_of_nested_contexts_ends():
    """A loss keeps what it has read unsharded for its backward; what was written there is kept, and can be saved."""
    model = wrapped(Chain())
    first, second, _ = (layer.weight for layer in model.module.layers)
    with model.gathered():
        with model.gathered([first, second]):
            pass
        assert first.square().sum().requires_grad
        with torch.no_grad():
            first.fill_(3.0)
            second.fill_(4.0)
    assert unsharded(model) == ["layers.0"]
    assert [bucket.params.own.max().item() for bucket in model.buckets[:2]] == [3.0, 4.0]
