"""SOAP, whose states are those of whole matrices, trains under every sharding as in one process; NorMuon continues."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.zero.optimizers.test_muon import (
    BETAS,
    TOLERANCE,
    Case,
    is_matrix,
    plain_updates,
    start,
    start_variant,
    train_plain,
    train_steps,
    whole_params,
)
from tests.ranks import run_cases, run_ranks
from zero.checkpoint import resident
from zero.checkpoint.checkpoint import SCHEMA, load, save
from zero.checkpoint.layout_file import read_layout
from zero.checkpoint.saved_state import SavedState
from zero.settings.config import OffloadConfig
from zero.updates.soap import SHIFT, Soap

NUM_STEPS, BETA, EPS, REFRESH_EVERY = 3, 0.9, 1e-4, 2

CASES = [
    Case(0, 2),
    Case(1, 2, bucket_numel=900),
    Case(2, 1, 2, num_micro_batches=2),
    Case(3, 2, bucket_numel=5000),
    Case(3, 1, 2, offload=OffloadConfig(mode="host")),
]


class PlainSoap:
    """SOAP of one matrix, from the definition."""

    def __init__(self, shape: torch.Size):
        self.left, self.right = torch.zeros(shape[0], shape[0]), torch.zeros(shape[1], shape[1])
        self.left_basis, self.right_basis = torch.eye(shape[0]), torch.eye(shape[1])
        self.first, self.second = torch.zeros(shape), torch.zeros(shape)
        self.num_steps = 0

    def update(self, grad: Tensor) -> Tensor:
        self.left = BETA * self.left + (1 - BETA) * grad @ grad.T
        self.right = BETA * self.right + (1 - BETA) * grad.T @ grad
        if self.num_steps % REFRESH_EVERY == 0:
            self.left_basis, self.right_basis = (
                torch.linalg.qr((side + SHIFT * side.trace() / len(side) * torch.eye(len(side))) @ basis)[0]
                for side, basis in ((self.left, self.left_basis), (self.right, self.right_basis))
            )
        self.num_steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * grad
        rotated = self.left_basis.T @ grad @ self.right_basis
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * rotated**2
        first = self.left_basis.T @ self.first @ self.right_basis / (1 - BETAS[0] ** self.num_steps)
        second = self.second / (1 - BETAS[1] ** self.num_steps)
        return self.left_basis @ (first / (second.sqrt() + EPS)) @ self.right_basis.T


@cache
def train_whole() -> dict[str, Tensor]:
    return train_plain(plain_updates(PlainSoap), NUM_STEPS, eps=EPS)


def start_soap(case: Case):
    return start(case, kind=Soap, dtype="fp64", eps=EPS, shampoo_beta=BETA, refresh_every=REFRESH_EVERY)


NORMUON = "cautious normuon per head"
NORMUON_CASES = [Case(0, 2, variant=NORMUON), Case(2, 1, 2, variant=NORMUON), Case(3, 2, variant=NORMUON)]
ON_GRAM = "polar express on gram matrices per head"
MUON_CASES = [Case(0, 2, variant="polar express per head"), Case(3, 2, variant=ON_GRAM), Case(2, 2, variant=ON_GRAM)]
RESUMED: dict[str, tuple[Callable, list[Case]]] = {
    "soap": (start_soap, CASES),
    "normuon": (start_variant, NORMUON_CASES),
    "muon": (start_variant, MUON_CASES),
}


def train_and_resume(name: str, number: int, folder: Path) -> dict[str, Tensor]:
    """Save after two steps, and continue; then continue what the case before this one has saved."""
    start, cases = RESUMED[name]
    case = cases[number]
    model, optimizer = start(case)
    train_steps(model, optimizer, case.num_micro_batches, range(2))
    save(folder / str(number), model, optimizer)
    train_steps(model, optimizer, case.num_micro_batches, range(2, NUM_STEPS))
    trained = whole_params(model, optimizer.tensor)
    if number:
        model, optimizer = start(case)
        load(folder / str(number - 1), model, optimizer)
        train_steps(model, optimizer, case.num_micro_batches, range(2, NUM_STEPS))
        resumed = whole_params(model, optimizer.tensor)
        torch.testing.assert_close(resumed, trained, rtol=0, atol=TOLERANCE)
    return trained


@pytest.mark.parametrize(("name", "expected"), [("soap", train_whole), ("normuon", None), ("muon", None)])
def test_states_of_matrices_continue_under_other_layouts(name, expected, tmp_path):
    numbers = range(len(RESUMED[name][1]))
    found = run_cases(2, train_and_resume, [(name, number, tmp_path) for number in numbers])
    for params in (params for results in found for params in results):
        torch.testing.assert_close(params, expected() if expected else found[0][0], rtol=0, atol=TOLERANCE)


def num_files_opened(case: Case, folder: Path) -> int:
    """Save the states of whole matrices, load them again, and return the number of files that this rank has opened."""
    model, optimizer = start_soap(case)
    train_steps(model, optimizer, case.num_micro_batches, range(1))
    save(folder, model, optimizer)
    saved, states = SavedState(folder, read_layout(folder, SCHEMA)["state"]), optimizer.updates[0].states()
    expected = {name: state.clone() for name, state in states.items()}
    for state in states.values():
        state.zero_()
    saved.load_by_name(states, model.shard_axis.rank, optimizer.tensor.rank)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)
    return saved.file.cache_info().misses


def test_a_rank_finds_its_matrices_in_its_own_file_if_the_layout_is_the_same(tmp_path):
    cases = [(case, tmp_path / str(number)) for number, case in enumerate(CASES)]
    assert run_cases(2, num_files_opened, cases) == [[1, 1]] * len(cases)


def state_bytes() -> tuple[float, float]:
    model, optimizer = start_soap(Case(2, 1, 2))
    train_steps(model, optimizer, 1, range(1))
    allocated = resident.resident_states(model, optimizer).moments
    axis, total = optimizer.tensor, torch.tensor(float(allocated))
    axis.all_reduce(total, out=total).wait()
    num_parameters = sum(param.numel() for param in model.module.parameters())
    # Adam's moments of parameters in fp64 have 16 bytes, and not the 8 of fp32.
    hidden = sum(param.numel() for name, param in model.module.named_parameters() if is_matrix(name, param))
    return total.item(), axis.size * (
        optimizer.state_bytes_per_element * num_parameters + 8 * (num_parameters - hidden)
    )


def test_the_states_of_matrices_are_where_they_are_computed():
    """Both tensor ranks together have the states of all matrices once."""
    for allocated, expected in run_ranks(2, state_bytes):
        assert allocated == pytest.approx(expected, rel=0.01)
