"""The settings and the compiler of compiled blocks."""

import copy
import pickle
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.model import compiled_blocks
from gpt.model.transformer import GPT, initialize
from gpt.shape.config import ModelConfig
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens
from parallel.validation.errors import ConfigError
from tests.distributed.zero.compiled.backend import Backend

IDS = torch.arange(8)[None]


def gpt_of(num_layers: int) -> GPT:
    gpt = GPT(ModelConfig(num_layers, 16, 2, 8, 50, dropout=0.0), ReplicatedTokens(Axis.trivial("tensor")))
    initialize(gpt, seed=0)
    return gpt


class Unobtrusive(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_blocks_are_compiled_for_training_only():
    backend = Backend()
    gpt = gpt_of(2)
    compiled_blocks.compile_blocks(gpt, "nothing", backend)
    gpt.eval()
    with torch.no_grad():
        expected = gpt(IDS)
    gpt.train()
    with Unobtrusive():  # such as one that counts FLOPs
        gpt(IDS)
    assert not backend.num_operations
    torch.testing.assert_close(gpt(IDS), expected)
    assert len(backend.num_operations) == 1


@pytest.mark.parametrize("may_break", [False, True])
def test_a_graph_ends_where_something_cannot_be_traced_only_if_it_may(may_break: bool):
    gpt = gpt_of(1)
    activation = gpt.blocks[0].mlp.activation
    expected = gpt(IDS)

    def untraceable(up: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return activation(up)

    gpt.blocks[0].mlp.activation = untraceable
    torch.compiler.reset()
    compiled_blocks.compile_blocks(gpt, "nothing", "eager", may_break=may_break)
    if may_break:
        torch.testing.assert_close(gpt(IDS), expected)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            gpt(IDS)


def test_a_copy_has_blocks_of_its_own():
    gpt = gpt_of(1)
    expected = gpt(IDS)
    compiled_blocks.compile_blocks(gpt, "nothing", Backend())
    for other in (copy.deepcopy(gpt), pickle.loads(pickle.dumps(gpt))):
        torch.testing.assert_close(other(IDS), expected)
        other.blocks[0].mlp.down.weight.data.fill_(1.0)
        assert not other(IDS).allclose(expected)


@pytest.mark.parametrize(("device", "name"), [("cuda", "triton"), ("cpu", r"C\+\+")])
def test_a_compiler_that_is_not_installed_is_named(device: str, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_blocks, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=f"train.compile=blocks needs .*{name}"):
        compiled_blocks.check_compiler(torch.device(device))


def trained(budget: float | None, lengths: list[int]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the bytes that each forward of a block saves for backward, and the gradients of all.

    The model is evaluated first, as a run may be.
    """
    gpt = gpt_of(1)
    parameters = {param.untyped_storage().data_ptr() for param in gpt.parameters()}
    compiled_blocks.compile_blocks(gpt, "nothing", Backend("aot_eager_decomp_partition"), budget=budget)
    gpt.eval()
    with torch.no_grad():
        gpt(IDS)
    gpt.train()
    num_bytes = []
    for length in lengths:
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = gpt(IDS[:, :length], IDS[:, :length]).sum()
        num_bytes.append(sum(size for place, size in saved.items() if place not in parameters))
        loss.backward()
    return num_bytes, {name: param.grad for name, param in gpt.named_parameters()}


def test_blocks_save_less_within_a_budget_and_have_the_same_gradients():
    """Sequences of another length have another graph, which has the budget too."""
    (all_of_it, all_of_short), expected = trained(None, [8, 6])
    (half, half_of_short), found = trained(0.5, [8, 6])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (inputs,), _ = trained(0.0, [8])
    assert inputs < half < all_of_it
    assert half_of_short < all_of_short
