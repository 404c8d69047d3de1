"""Modules that cannot be wrapped are refused by name; what looks like them is accepted, and trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis
from parallel.validation.errors import ConfigError
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


class Wrapper(Tensor):
    """A tensor whose values are in another one, as those of a quantized tensor or of a DTensor are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*args, **(kwargs or {}))
        return Wrapper(result) if func is torch.ops.aten.detach.default else result


class Tagged(Tensor):
    """A subclass with memory of its own, which is divided as any other parameter."""


class Pair(nn.Module):
    """A module with what `change` makes of its parameters."""

    def __init__(self, change: Callable[["Pair"], object]):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        change(self)


def set_data(pair: Pair, a: Tensor, b: Tensor) -> None:
    pair.a.data, pair.b.data = a, b


FUSED = torch.randn(4, 8)
FROZEN = nn.Parameter(Wrapper(torch.ones(2)), requires_grad=False)
COMPLEX = nn.Parameter(torch.ones(4, dtype=torch.complex64))
AS_PAIRS = r"^rotary\.phase is torch\.complex64; store it as pairs of real numbers \(torch\.view_as_real\)"
SCRIPTED = "of torch.jit, which keeps .* wrap the module that was scripted or traced, and use torch.compile"
REFUSED: dict[str, tuple[Callable[[Pair], object], str]] = {
    "wrapper": (lambda pair: setattr(pair, "a", nn.Parameter(Wrapper(torch.ones(2)))), "^a is a Wrapper"),
    "frozen wrapper": (lambda pair: setattr(pair, "a", FROZEN), "^a is a Wrapper"),
    "one storage": (lambda pair: setattr(pair.b, "data", pair.a.data), "^a and b are views of the same memory"),
    "transposed": (lambda pair: setattr(pair, "b", nn.Parameter(pair.a.t())), "^a and b are"),
    "one of them frozen": (lambda pair: setattr(pair, "b", nn.Parameter(pair.a.t(), requires_grad=False)), "^a and b"),
    "other dtype": (lambda pair: setattr(pair, "b", nn.Parameter(pair.a.data.view(torch.float16))), "^a and b are"),
    "overlapping rows": (lambda pair: set_data(pair, FUSED.view(8, 4)[:4], FUSED.view(8, 4)[3:7]), "^a and b are"),
    "overlapping columns": (lambda pair: set_data(pair, FUSED[:, :4], FUSED[:, 3:7]), "^a and b are"),
    "an attribute": (lambda pair: setattr(pair, "kept", pair.b.detach().t()), "^b and kept are views of the same"),
    "a buffer": (lambda pair: pair.register_buffer("row", pair.b.data[1]), "^b and row are"),
    "complex": (lambda pair: pair.add_module("rotary", nn.ParameterDict({"phase": COMPLEX})), AS_PAIRS),
    "complex and frozen": (
        lambda pair: pair.add_module("rotary", nn.ParameterDict({"phase": COMPLEX}).requires_grad_(False)),
        AS_PAIRS,
    ),
    "scripted": (
        lambda pair: pair.add_module("inner", nn.Sequential(torch.jit.script(nn.Linear(2, 2)))),
        rf"^inner\.0 is a RecursiveScriptModule {SCRIPTED}",
    ),
    "traced": (
        lambda pair: pair.add_module("inner", torch.jit.trace(nn.Linear(2, 2), torch.ones(2))),
        rf"^inner is a TopLevelTracedModule {SCRIPTED}",
    ),
    "a buffer before it": (lambda pair: pair.register_buffer("all", pair.b.data.flatten()), "^(all and b|b and all) "),
}
ACCEPTED: dict[str, Callable[[Pair], object]] = {
    "one parameter": lambda pair: setattr(pair, "b", pair.a),
    "rows": lambda pair: set_data(pair, FUSED.view(8, 4)[:4], FUSED.view(8, 4)[4:]),
    "columns": lambda pair: set_data(pair, FUSED[:, :4], FUSED[:, 4:]),
    "every second column": lambda pair: set_data(pair, FUSED[:, ::2], FUSED[:, 1::2]),
    "two buffers": lambda pair: [pair.register_buffer(name, FUSED.view(-1)) for name in "cd"],
    "without elements": lambda pair: set_data(pair, FUSED[:0], FUSED[:0]),
    "a subclass": lambda pair: setattr(pair, "a", nn.Parameter(torch.ones(4, 4).as_subclass(Tagged))),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused_by_name(kind):
    change, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        ZeroDataParallel(Pair(change), Axis.trivial("data"), ZeroConfig(0))


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_a_spectral_norm_is_trained():
    model = ZeroDataParallel(nn.utils.spectral_norm(nn.Linear(4, 4)), Axis.trivial("data"), ZeroConfig(2))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.step() > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scripted_module_is_refused_as_the_model_and_after_wrapping(stage):
    with pytest.raises(ConfigError, match=f"^the module is a RecursiveScriptModule {SCRIPTED}"):
        ZeroDataParallel(torch.jit.script(nn.Linear(2, 2)), Axis.trivial("data"), ZeroConfig(stage))
    model = ZeroDataParallel(nn.Sequential(nn.Linear(2, 2)), Axis.trivial("data"), ZeroConfig(stage))
    optimizer = ZeroOptimizer(model, torch.optim.SGD)
    model.module.add_module("added", torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=f"^added is a RecursiveScriptModule {SCRIPTED}"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_shares_no_element_is_accepted(kind, stage):
    module = Pair(ACCEPTED[kind])
    expected = [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]
    module = ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(stage)).unwrap()
    assert all(map(torch.equal, (*module.parameters(), *module.buffers()), expected))
