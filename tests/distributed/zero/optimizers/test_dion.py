"""Dion under every stage, along the tensor axis too, trains as the formulas in one process, and sends factors."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh import Mesh
from tests.distributed.zero.optimizers.test_muon import (
    CONFIG,
    LLAMA,
    TOLERANCE,
    Case,
    case_of,
    plain_updates,
    sent_by_axis,
    start,
    train_plain,
    train_steps,
    whole_params,
)
from tests.pairwise import pairwise
from tests.ranks import run_cases, run_ranks
from tests.twins import all_params
from zero.engine import ZeroDataParallel
from zero.memory.placement import NO_OFFLOAD, OffloadConfig
from zero.optimizer import ZeroOptimizer
from zero.optimizers.dion import Dion
from zero.optimizers.matrices import Matrix
from zero.partition.config import ZeroConfig
from zero.state import resident
from zero.state.checkpoint import load, save

NUM_STEPS, MOMENTUM, FRACTION = 3, 0.9, 0.25
SETTINGS: dict[str, Any] = {"kind": Dion, "dtype": "fp64", "momentum": MOMENTUM, "rank_fraction": FRACTION}


def first_right_factor(shape: torch.Size) -> Tensor:
    optimizer = Dion([torch.zeros(shape, requires_grad=True)], rank_fraction=FRACTION, dtype="fp64")
    return optimizer.matrix_state(tuple(shape), torch.device("cpu"))["right_factor"]


class PlainDion:
    """Dion of one matrix, by algorithm 1 of the paper."""

    def __init__(self, shape: torch.Size):
        self.momentum, self.right = torch.zeros(shape), first_right_factor(shape)

    def update(self, grad: Tensor) -> Tensor:
        buffer = self.momentum + grad
        left, _ = torch.linalg.qr(buffer @ self.right)
        product = buffer.T @ left
        self.momentum = buffer - (1 - MOMENTUM) * left @ product.T
        self.right = product / product.norm(dim=0)
        return math.sqrt(len(grad) / grad.shape[1]) * left @ self.right.T


@cache
def train_whole(config=CONFIG, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    return train_plain(plain_updates(PlainDion), num_steps, config)


def start_dion(case: Case, dtype: str = "fp64"):
    return start(case, **SETTINGS | {"dtype": dtype})


def train(case: Case) -> dict[str, Tensor]:
    model, optimizer = start_dion(case)
    train_steps(model, optimizer, case.num_micro_batches, range(NUM_STEPS))
    return whole_params(model, optimizer.tensor)


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "ranks": [(2, 1), (2, 2)],
    "bucket_numel": [300, None],
    "model": [CONFIG, LLAMA],
}


def test_dion_equals_the_formulas_in_one_process():
    cases = [case_of(placed=NO_OFFLOAD, **combination) for combination in pairwise(**FACTORS)]
    for num_ranks in {case.num_ranks for case in cases}:
        chosen = [[case] for case in cases if case.num_ranks == num_ranks]
        for (case,), found in zip(chosen, run_cases(num_ranks, train, chosen), strict=True):
            for params in found:
                torch.testing.assert_close(params, train_whole(case.model), rtol=0, atol=TOLERANCE)


def train_one_matrix(case: Case) -> dict[str, Tensor]:
    def groups(gpt: nn.Module) -> list[dict[str, Any]]:
        matrix = gpt.get_parameter("blocks.1.mlp.down.weight")
        rest = [param for param in gpt.parameters() if param is not matrix]
        return [{"params": [matrix]}, {"params": rest, "update": "adamw"}]

    model, optimizer = start(case, groups=groups, **SETTINGS)
    train_steps(model, optimizer, 1, range(NUM_STEPS))
    return whole_params(model, optimizer.tensor)


def test_ranks_without_elements_of_a_matrix_take_part():
    (expected,) = run_ranks(1, train_one_matrix, Case(1, 1))
    for params in run_ranks(4, train_one_matrix, Case(2, 4, bucket_numel=None)):
        torch.testing.assert_close(params, expected, rtol=0, atol=TOLERANCE)


RESUMED = [
    Case(0, 2),
    Case(1, 2, bucket_numel=900),
    Case(2, 1, 2, num_micro_batches=2),
    Case(3, 2, bucket_numel=5000),
    Case(3, 1, 2, offload=OffloadConfig(mode="host")),
]


def train_and_resume(number: int, folder: Path, dtype: str) -> None:
    """Save after two steps and continue; then resume it, and what the case before this one has saved."""
    case = RESUMED[number]
    model, optimizer = start_dion(case, dtype)
    train_steps(model, optimizer, case.num_micro_batches, range(2))
    save(folder / str(number), model, optimizer)
    train_steps(model, optimizer, case.num_micro_batches, range(2, NUM_STEPS))
    trained = whole_params(model, optimizer.tensor)
    a_new_run, one_that_goes_back = start_dion(case, dtype), (model, optimizer)
    for earlier in {number, max(number - 1, 0)} if dtype == "fp64" else {number}:
        for resumed_model, resumed in (a_new_run, one_that_goes_back):
            load(folder / str(earlier), resumed_model, resumed)
            train_steps(resumed_model, resumed, case.num_micro_batches, range(2, NUM_STEPS))
            found = whole_params(resumed_model, resumed.tensor)
            tolerance = 0 if earlier == number else TOLERANCE
            torch.testing.assert_close(found, trained, rtol=0, atol=tolerance)


def test_a_resumed_run_has_the_same_bits_and_other_layouts_continue_it(tmp_path):
    run_cases(2, train_and_resume, [(number, tmp_path, "fp64") for number in range(len(RESUMED))])
    run_cases(2, train_and_resume, [(number, tmp_path / "fp32", "fp32") for number in (1, 2)])


def update_by_a_product(num_columns: int) -> Tensor:
    """Return the update that a gradient of rank 1 makes of zeros, a matrix that lies on two ranks."""
    linear = nn.Linear(num_columns, 256, bias=False, dtype=torch.float32)
    nn.init.zeros_(linear.weight)
    model = ZeroDataParallel(linear, Mesh.create(tensor_size=1).data, ZeroConfig(2))
    optimizer = ZeroOptimizer(model, Dion, lr=1.0, rank_fraction=0.25, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(1, num_columns, generator=generator), torch.randn(256, generator=generator)
    (model(x) @ weights).sum().backward()
    optimizer.step()
    return linear.weight.detach().clone() / math.sqrt(256 / num_columns)


def test_a_direction_that_rounding_makes_has_no_update():
    """An orthonormal factor of a matrix of rank 1 has one singular value, 1."""
    for update in run_ranks(2, update_by_a_product, 128):
        values = torch.linalg.svdvals(update)
        torch.testing.assert_close(values[0].item(), 1.0, rtol=0.02, atol=0)
        assert values[1] < 0.02


def start_adamw(case: Case):
    return start(case, kind=torch.optim.AdamW, groups=all_params)


def sent_in_a_step(case: Case, start_run) -> tuple[dict[str, int], Any, Any]:
    """Return the bytes of all-to-alls along the shard axis and of all-reduces along the tensor axis of a step."""
    model, optimizer = start_run(case)
    train_steps(model, optimizer, 1, range(1))  # the first update also shares the right factors
    model.data.log.clear()
    train_steps(model, optimizer, 1, range(1, 2))
    sent = {"shard": sent_by_axis(model)["shard"], "tensor": 0}
    for (axis, op, _), num_bytes in model.data.log.wire_bytes_by.items():
        sent["tensor"] += num_bytes if (axis, op) == ("tensor", "all_reduce") else 0
    return sent, model, optimizer


def measure(case: Case, dtype: str) -> dict[str, Any]:
    """Return what a rank sends for factors in a step, what it has of each parameter, and the bytes of its states."""
    without, _, _ = sent_in_a_step(case, start_adamw)
    sent, model, optimizer = sent_in_a_step(case, partial(start_dion, dtype=dtype))
    pieces = [piece for bucket in optimizer.buckets for piece in optimizer.pieces_of(bucket)]
    updates = optimizer.matrices
    adam = sum(piece.param.numel() for piece in pieces if piece.group == 1)
    return {
        "rank": model.shard_axis.rank,
        "sent": {axis: num_bytes - without[axis] for axis, num_bytes in sent.items()},
        "held": [(piece.name, piece.in_param) for piece in pieces if piece.group != 1],
        "matrices": updates.matrices,
        "owners": [rank for rank, _ in updates.assignment.places],
        "planned": updates.sent_numels()[model.shard_axis.rank],
        "right": resident.resident_states(model, optimizer).moments
        - 8 * sum(piece.param.numel() for piece in pieces)
        - 8 * adam,
        "all_right": updates.state_bytes,
    }


def rows_held(matrix: Matrix, held: list[tuple[str, range]]) -> list[int]:
    """Return the numbers of rows of a matrix that a rank's pieces of parameters touch."""
    found = []
    for name, elements in held:
        if name == matrix.param:
            rows = range(elements.start // matrix.shape[1], -(-elements.stop // matrix.shape[1]))
            found.append(sum(row % matrix.period in matrix.rows for row in rows))
    return found


MEASURED = [(Case(3, 4, bucket_numel=256), "fp32"), (Case(2, 2, 2, bucket_numel=128), "fp32"), (Case(0, 4), "fp64")]


def test_factors_are_all_that_is_sent():
    """A rank that has h of m rows of a matrix, with r columns in its factors, sends (h + n + 1) r to its owner.

    The owner sends as much back. A row that two ranks have a part of counts for
    both. Tensor ranks add whole factors of the matrices of one owner, (m + n + 1) r elements, or (m + n + T) r if they
    divide the columns.
    """
    for (case, dtype), found in zip(MEASURED, run_cases(4, measure, MEASURED), strict=True):
        check_messages(found, case.tensor_size, {"fp32": 4, "fp64": 8}[dtype])


def check_messages(found: list[dict[str, Any]], num_parts: int, itemsize: int) -> None:
    matrices, owners = found[0]["matrices"], found[0]["owners"]
    expected = {rank["rank"]: 0 for rank in found}
    of_tensor = dict(expected)
    num_right = dict(expected)
    for matrix, owner in zip(matrices, owners, strict=True):
        columns = math.ceil(FRACTION * min(matrix.whole_shape))
        num_tensor = matrix.num_parts if matrix.joined_dim == 1 else 1
        of_tensor[owner] += (matrix.whole_shape[0] + matrix.whole_shape[1] + num_tensor) * columns
        for one in {rank["rank"]: rank for rank in found}.values():
            rows = rows_held(matrix, one["held"])
            if rows:
                num_right[one["rank"]] += columns * matrix.shape[1] * (num_tensor if one["rank"] == owner else 1)
            if rows and one["rank"] != owner:
                numel = (sum(rows) + matrix.shape[1] + 1) * columns
                expected[one["rank"]] += numel
                expected[owner] += numel
    for rank in found:
        assert rank["sent"]["shard"] == itemsize * expected[rank["rank"]] == itemsize * rank["planned"]
        assert rank["sent"]["tensor"] == 2 * (num_parts - 1) * itemsize * of_tensor[rank["rank"]] // num_parts
        assert rank["right"] == itemsize * num_right[rank["rank"]]
    assert found[0]["all_right"] == itemsize * sum(num_right.values())
