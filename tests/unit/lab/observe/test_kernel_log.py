"""The kernels, FLOPs and bytes of operations, compared with what a GPU runs."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.kernels.documents import Documents
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.observe.kernel_log import kernels_of


@pytest.fixture(params=["real", "fake"], autouse=True)
def tensor_mode(request: Any) -> Iterator[None]:
    with QuickFakeTensorMode() if request.param == "fake" else nullcontext():
        yield


def test_a_copy_of_a_tensor_onto_itself_is_no_kernel():
    whole = torch.zeros(8, 4)
    assert kernels_of(lambda: whole.copy_(whole)) == []
    assert kernels_of(lambda: whole[2:5].copy_(whole[2:5])) == []


@pytest.mark.parametrize("source", [lambda x: x[4:], lambda x: x[4:].t(), lambda x: x.clone()[:4]])
def test_a_copy_of_other_elements_reads_and_writes(source: Callable[[Tensor], Tensor]):
    whole = torch.zeros(8, 4)
    copied = source(whole)
    (kernel,) = kernels_of(lambda: whole[:4].copy_(copied))
    assert kernel.num_bytes == 2 * 16 * 4


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mm": lambda a, b, sums: torch.mm(a[0], b[0]),
    "mm.out": lambda a, b, sums: torch.mm(a[0], b[0], out=sums[0]),
    "addmm": lambda a, b, sums: torch.addmm(sums[0], a[0], b[0]),
    "addmm.out": lambda a, b, sums: torch.addmm(sums[0], a[0], b[0], out=torch.empty_like(sums[0])),
    "addmm_": lambda a, b, sums: sums[0].addmm_(a[0], b[0]),
    "addmm, activation": lambda a, b, sums: torch._addmm_activation(sums[0, 0], a[0], b[0], use_gelu=True),
    "bmm": lambda a, b, sums: torch.bmm(a, b),
    "bmm.out": lambda a, b, sums: torch.bmm(a, b, out=sums),
    "baddbmm": lambda a, b, sums: torch.baddbmm(sums, a, b),
    "baddbmm_": lambda a, b, sums: sums.baddbmm_(a, b),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_form_of_a_product_counts_its_operations(name: str):
    a, b, sums = torch.zeros(2, 3, 5), torch.zeros(2, 5, 7), torch.zeros(2, 3, 7)
    (kernel,) = kernels_of(lambda: PRODUCTS[name](a, b, sums))
    batch = 2 if name.startswith("b") else 1
    assert kernel.product == (batch, 3, 7, 5)
    assert kernel.flops == 2 * batch * 3 * 7 * 5


@pytest.mark.parametrize(
    ("compute", "num_passes"),
    [
        (lambda x, y, out: torch.mul(x, y, out=out), 3),
        (lambda x, y, out: torch.mul(x, y), 3),
        (lambda x, y, out: x.mul_(y), 3),
        (lambda x, y, out: out.copy_(x), 2),
    ],
)
def test_a_result_is_written_once(compute: Callable[[Tensor, Tensor, Tensor], Any], num_passes: int):
    x, y, out = (torch.zeros(100) for _ in range(3))
    (kernel,) = kernels_of(lambda: compute(x, y, out))
    assert kernel.num_bytes == num_passes * 400


@pytest.mark.parametrize(("has_weights", "num_passes"), [(True, 5), (False, 3)])
def test_backward_of_a_layer_norm_reads_its_arguments_again_for_its_weights(has_weights: bool, num_passes: int):
    """The case of issue 17: 8,192 tokens of GPT-2 1.5B in bf16, 131 MB."""
    tokens, hidden = 8192, 1600
    norm = torch.nn.LayerNorm(hidden, dtype=torch.bfloat16).requires_grad_(has_weights)
    y = norm(torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True))
    grad = torch.empty_like(y)
    (kernel,) = (k for k in kernels_of(lambda: y.backward(grad)) if k.name == "native_layer_norm_backward")
    assert kernel.num_bytes == pytest.approx(num_passes * 2 * tokens * hidden, rel=2e-3)


@pytest.mark.parametrize(("has_weights", "num_passes"), [(True, 5), (False, 3)])
def test_backward_of_a_fused_rms_norm_reads_its_arguments_again_for_its_weights(has_weights: bool, num_passes: int):
    tokens, hidden = 8192, 1600
    with QuickFakeTensorMode():  # the kernel exists on GPUs only
        grad, x = (torch.empty(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
        weight, rstd = torch.empty(hidden, dtype=torch.bfloat16), torch.empty(tokens, 1)
        backward = torch.ops.aten._fused_rms_norm_backward
        (kernel,) = kernels_of(lambda: backward(grad, x, [hidden], rstd, weight, [True, has_weights]))
    assert kernel.num_bytes == pytest.approx(num_passes * 2 * tokens * hidden, rel=2e-3)


def test_a_gather_and_a_scatter_move_the_elements_that_the_index_selects():
    x, index, column = torch.zeros(8, 100), torch.zeros(8, 1, dtype=torch.int64), torch.zeros(8, 1)
    moved = index.nbytes + 2 * column.nbytes
    for compute in (lambda: x.gather(1, index), lambda: x.scatter_(1, index, column)):
        (kernel,) = kernels_of(compute)
        assert kernel.num_bytes == moved


def test_an_embedding_moves_the_rows_that_it_selects():
    weight, rows = torch.zeros(1000, 8), torch.zeros(5, dtype=torch.int64)
    (kernel,) = kernels_of(lambda: torch.nn.functional.embedding(rows, weight))
    assert kernel.num_bytes == 5 * 8 + 2 * 5 * 8 * 4


def test_fused_attention_says_its_shape_and_its_products():
    q, k, v = (torch.zeros(2, 3, seq, 16, requires_grad=True) for seq in (5, 7, 7))
    attend = torch.nn.functional.scaled_dot_product_attention
    found = [kernel.attention for kernel in kernels_of(lambda: attend(q, k, v).sum().backward())]
    assert [shape for shape in found if shape is not None] == [(6, 5, 7, 16, 2), (6, 5, 7, 16, 5)]


def test_attention_of_stretches_has_the_operations_of_equal_ones():
    with QuickFakeTensorMode():  # the kernel exists on GPUs only
        q, k, v = (torch.empty(1, heads, 12, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        documents = Documents(torch.empty(1, 12, dtype=torch.int64), torch.empty(4, dtype=torch.int32))

        def attend() -> None:
            documents.attention(q, k, v, dropout=0.0).sum().backward()

        found = [kernel.attention for kernel in kernels_of(attend)]
    assert [shape for shape in found if shape is not None] == [(4 * 3, 4, 4, 16, 2), (4 * 3, 4, 4, 16, 5)]


def test_the_precision_of_a_product_is_that_of_its_factors():
    with QuickFakeTensorMode():  # real products of this kind exist on GPUs only
        a, b = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)
        sums = torch.empty(3, 7)
        (kernel,) = kernels_of(lambda: torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums))
    assert kernel.dtype == torch.bfloat16
    assert kernel.flops == 2 * 3 * 7 * 5
    assert kernel.num_bytes == a.nbytes + b.nbytes + 2 * sums.nbytes
