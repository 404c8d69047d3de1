"""Uses of a wrapped module that are refused, with the reason, and what wrapping and unwrapping leave."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.cuda._sanitizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.mesh import Axis
from parallel.tensor.gradient_sums import GradientSums
from parallel.tensor_tree import find_tensors
from parallel.validation.errors import ConfigError
from zero.checkpoint.checkpoint import load, save
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

DATA = Axis.trivial("data")


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def wrapped(stage: int = 3) -> ZeroDataParallel:
    return ZeroDataParallel(two_layers(), DATA, ZeroConfig(stage))


def test_gradients_from_before_are_refused():
    module = two_layers()
    module(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"^0\.weight has a gradient from before it is wrapped; call `module\.zero_gr"):
        ZeroDataParallel(module, DATA, ZeroConfig(2))


@pytest.mark.parametrize("name", ["missing", "in_features"])
def test_only_a_method_of_a_module_of_the_model_is_registered(name):
    model = wrapped()
    message = f"^{name} is not a method of a module of this model; the module is a Linear$"
    with pytest.raises(ValueError, match=message):
        model.register_forward_method(name, model.module[0])
    with pytest.raises(ValueError, match=r"^forward is not a method of a module of this model"):
        model.register_forward_method("forward", nn.Linear(4, 4))
    model.register_forward_method("forward", model.module[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_registered_method_is_called_with_is_cast_as_the_inputs_of_the_forward(stage):
    model = ZeroDataParallel(two_layers(), DATA, ZeroConfig(stage), param_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        model.module(torch.ones(1, 4))
    model.register_forward_method("forward")
    assert model.module(torch.ones(1, 4)).dtype is torch.bfloat16
    model.unwrap()


def test_a_model_that_is_wrapped_in_inference_mode_is_trained():
    module = two_layers()
    with torch.inference_mode():
        model = ZeroDataParallel(module, DATA, ZeroConfig(3))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    assert optimizer.step() > 0
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"^0\.weight was made in torch\.inference_mode"):
        ZeroDataParallel(two_layers(), DATA, ZeroConfig(2))


class ReadingAddresses(TorchDispatchMode):
    """A mode that reads the addresses of all tensors of an operation, as torch's CUDA sanitizer does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in find_tensors((args, kwargs))[0]:
            tensor.data_ptr()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_runs_under_torchs_sanitizer(stage: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda._sanitizer.cuda_sanitizer, "enabled", True)
    with ReadingAddresses():
        model = wrapped(stage)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def test_hooks_that_others_have_removed_are_missed_at_once():
    model = wrapped()
    model.module._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="a Sequential inside ZeroDataParallel has lost the hooks"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize(("stage", "units", "warns"), [(3, None, True), (3, ("0",), False), (2, None, False)])
def test_a_large_model_that_is_gathered_at_once_warns(stage: int, units: Any, warns: bool):
    module = nn.Sequential(nn.Linear(1100, 1000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeroDataParallel(module, DATA, ZeroConfig(stage, units=units))
    assert [(w.filename, "gathers all of a Sequential at once" in str(w.message)) for w in caught] == [
        (__file__, True)
    ] * warns


def test_a_registered_method_may_call_the_model():
    class Sampling(nn.Sequential):
        def sample(self, forward: Any, x: Tensor) -> Tensor:
            return forward(x) * self.scale

    module = Sampling(*two_layers())
    module.scale = nn.Parameter(torch.full((4,), 2.0))
    model = ZeroDataParallel(module, DATA, ZeroConfig(3))
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model.register_forward_method("sample")
    for _ in range(2):
        model.module.sample(model, torch.ones(1, 4)).sum().backward()
        assert optimizer.step() > 0


def test_a_parameter_keeps_its_shape_and_its_type():
    model = wrapped(stage=2)
    weight = model.module[0].weight
    weight.data = torch.full((4, 4), 2.0)
    assert weight.eq(2.0).all()
    for values in (torch.ones(2, 2), torch.ones(4, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"weight is a torch\.float32 of shape \(4, 4\) on cpu .* cannot become"):
            weight.data = values
    assert weight.eq(2.0).all()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_unwrapped_module_keeps_nothing_of_the_engine(stage):
    model = wrapped(stage)
    model.register_forward_method("forward", model.module[1])
    engine, module = weakref.ref(model), model.unwrap()
    assert not hasattr(model, "module")
    del model
    gc.collect()
    assert engine() is None
    for part in module.modules():
        assert type(part._parameters) is dict
        assert not any((part._forward_hooks, part._forward_pre_hooks, part._load_state_dict_pre_hooks))
        assert "forward" not in vars(part)
    assert all(type(param) is nn.Parameter for param in module.parameters())


REFUSED = {
    "a group of inner": (lambda o: o.inner.add_param_group({"params": []}), ValueError, "with 1 parameter groups"),
    "a state of others": (
        lambda o: o.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}),
        ConfigError,
        r"groups of \[1\] parameters and the optimizer of \[4\]",
    ),
    "gradients": (lambda o: list(o.gradients()), RuntimeError, "gradient_hook"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_of_torchs_optimizers_that_cannot_work_are_refused_in_one_line(name):
    refused, error, message = REFUSED[name]
    model = wrapped()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(error, match=message) as caught:
        refused(optimizer)
    assert "\n" not in str(caught.value)
    optimizer.step()


def test_an_optimizer_is_made_like_a_plain_one():
    model = wrapped()
    groups = [{"params": [model.module[0].weight], "lr": 0.5}, {"params": [model.module[1].weight]}]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(0.5, 0.9), fused=True)
    optimizer = ZeroOptimizer.like(model, plain, clip_norm=1.0)
    assert optimizer.param_groups == plain.param_groups
    assert (type(optimizer.inner), optimizer.inner.defaults) == (torch.optim.AdamW, plain.defaults)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_code_for_checkpoints_does_not_step_the_optimizer(stage):
    """It steps an optimizer without a state, to have one."""
    model = wrapped(stage)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    with model.gathered() as module:
        before = [param.clone() for param in module.parameters()]
    get_optimizer_state_dict(model, optimizer)
    with model.gathered() as module:
        assert all(map(torch.equal, module.parameters(), before))
    assert [state["momentum_buffer"].numel() for state in optimizer.state.values()] == [16, 4, 16, 4]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_is_saved_and_loaded_without_an_effect_on_memory(stage, tmp_path):
    model = wrapped(stage)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW)
    save(tmp_path / "saved", model, optimizer)
    load(tmp_path / "saved", model, optimizer)
    assert all(flat.full.untyped_storage().resizable() for flat in model.flats)
    assert all(param.isfinite().all() for param in model.unwrap().parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_numpy_has_viewed_stays_allocated(stage):
    model = wrapped(stage)
    num_bytes = sum(flat.full.nbytes for flat in model.flats)
    with pytest.warns(UserWarning, match=rf"{num_bytes} bytes .* stay allocated.*clone\(\)\.numpy\(\)"):  # noqa: PT031
        with model.gathered() as module:
            viewed = module[0].weight.detach().numpy()
            expected = [param.detach().clone() for param in module.parameters()]
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
        assert viewed[3, 3] == expected[0][3, 3]
        assert all(map(torch.equal, model.unwrap().parameters(), expected))


@pytest.mark.parametrize(
    ("config", "num_hooks"),
    [
        (ZeroConfig(1), 0),
        (ZeroConfig(2, overlap_gather=True), 2),  # on each layer
        (ZeroConfig(3), 3),
        (ZeroConfig(3, overlap_gather=True), 3),
    ],
)
def test_modules_have_hooks_only_if_something_is_gathered_while_they_run(config, num_hooks):
    model = ZeroDataParallel(two_layers(), DATA, config)
    assert sum(len(part._forward_pre_hooks) for part in model.module.modules()) == num_hooks


class Doubles(nn.Linear):
    def twice(self, x: Tensor) -> Tensor:
        """Return the output times two."""
        return 2 * self(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_runs_its_registered_methods_with_its_own_values(copied):
    model = ZeroDataParallel(nn.Sequential(Doubles(4, 4)), DATA, ZeroConfig(3))
    for _ in range(2):
        model.register_forward_method("twice", model.module[0])
    assert model.module[0].twice.__doc__ == "Return the output times two."
    with model.gathered() as module:
        plain = copied(module)
    with torch.no_grad():
        plain[0].weight.fill_(1.0)
        plain[0].bias.zero_()
    x = torch.ones(1, 4)
    assert plain[0].twice(x).tolist() == plain[0].twice(x=x).tolist() == [[8.0] * 4]
    assert not model.module[0].twice(x).equal(plain[0].twice(x))


def test_an_unwrapped_module_sums_gradients_in_its_backward_again():
    module = nn.Linear(4, 4)
    sums = module.sums = GradientSums([module.bias], Axis.trivial("tensor"))
    model = ZeroDataParallel(module, DATA, ZeroConfig(1))
    sums.is_deferred = True  # as an optimizer on several tensor ranks does, which sums them once a step
    assert model.unwrap() is module
    assert not sums.is_deferred
