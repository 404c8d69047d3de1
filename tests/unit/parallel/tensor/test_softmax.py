"""The functions of the loss are compiled where a compiler works, and compute some rows at once elsewhere."""

from collections.abc import Iterator
from subprocess import SubprocessError

import pytest
import torch
from torch import Tensor

from lab.observe.fake_tensors import QuickFakeTensorMode
from parallel.tensor import softmax

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def empty_cache() -> Iterator[None]:
    softmax.prepared.cache_clear()
    yield
    softmax.prepared.cache_clear()


@pytest.mark.parametrize("error", [None, RuntimeError, ImportError, OSError, SubprocessError])
def test_the_loss_is_compiled_on_a_gpu_whose_compiler_works(error, monkeypatch, empty_cache):
    def compiled(logits: Tensor) -> Tensor:
        assert logits.device == GPU
        if error is not None:
            raise error("there is no compiler")
        return logits

    monkeypatch.setattr(softmax, "compiled", lambda _function: compiled)
    with QuickFakeTensorMode():
        assert softmax.inductor_works(GPU) is (error is None)
    assert softmax.inductor_works(CPU) is False


def test_a_compiled_function_runs_eager_while_operations_are_observed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda _function: lambda *_tensors: "compiled")
    function = softmax.compiled(lambda logits: logits.sum(1))
    assert function(torch.ones(2, 3)) == "compiled"
    with QuickFakeTensorMode():
        assert function(torch.ones(2, 3)).shape == (2,)


@pytest.mark.parametrize(
    ("num_words", "num_rows"), [(2**24, 1), (2**25, 1), (2**23, 2), (2**23 + 1, 1), (1, 2**24), (0, 2**24)]
)
def test_rows_have_a_constant_number_of_elements(num_words, num_rows):
    assert softmax.rows_at_once(num_words) == num_rows


@pytest.mark.parametrize("num_words", [4, 2, 1])
def test_rows_are_computed_some_at_a_time(num_words, monkeypatch):
    monkeypatch.setattr(softmax, "ROWS_NUMEL", 4)
    logits, factors, seen = torch.arange(3.0 * num_words).view(3, -1), torch.arange(3.0), []

    def compute(some: Tensor, own_factors: Tensor) -> Tensor:
        seen.append(len(some))
        return some.sum(1) * own_factors

    found = softmax.some_rows_at_once(compute)(logits, factors)
    assert found.equal(logits.sum(1) * factors)
    assert seen == {4: [1, 1, 1], 2: [2, 1], 1: [3]}[num_words]
    assert softmax.some_rows_at_once(lambda some: seen.clear())(logits) is None
    with pytest.raises(ValueError, match="longer"):
        softmax.some_rows_at_once(lambda some, _: some)(logits, torch.arange(30.0))
