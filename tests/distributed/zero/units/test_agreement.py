"""Ranks that take different branches if parameters are partitioned: an error names the branches, and no rank hangs."""

import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Mesh
from parallel.store import report_reason, shared_store, with_reason
from tests.ranks import run_cases, run_ranks
from zero.data_parallel import ZeroDataParallel
from zero.extensions import agreement
from zero.extensions.agreement import DivergedRanks
from zero.extensions.host_barrier import HostBarrier
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

T = TypeVar("T")
STAGE_3 = ZeroConfig(stage=3, bucket_numel=500, prefetch_numel=600)


class Branches(nn.Module):
    """Blocks of one size; forward runs those of `route`, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for index in route:
            x = self.blocks[index](x).tanh()
        return x.sum()


@dataclass
class Clock:
    """A clock of barriers, which goes on by `step` seconds whenever it is read."""

    step: float = 0.0
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def error_of(
    build: Callable[[Mesh], Callable[[T], None]], steps: list[list[T]], num_patient: int, shard_size: int | None = None
) -> str:
    """Call what `build` returns with steps[step][rank]; return the error of this rank, or an empty string.

    In the first `num_patient` steps no barrier ends without the other ranks; later, one does at its first poll.
    """
    mesh, clock = Mesh.create(tensor_size=1, shard_size=shard_size), Clock()
    with mock.patch.object(agreement, "HostBarrier", partial(HostBarrier, clock=clock)):
        run = build(mesh)
    try:
        for number, step in enumerate(steps):
            clock.step = 1e6 if number >= num_patient else 0.0
            run(step[mesh.data.rank % len(step)])
    except DivergedRanks as error:
        # Its connections end, even if a failed backward keeps the model in memory.
        vars(mesh.data).update(group=None, pairwise=None)
        return str(error)
    except RuntimeError as error:  # of a collective that another rank has left: it has the reason of that rank
        return str(error)
    finally:
        if num_patient < len(steps):
            dist.destroy_process_group()  # a rank that has diverged leaves at once
    return ""


def wrap(stage: int, differs: str) -> str:
    data = Mesh.create(tensor_size=1).data
    module = Branches()
    if differs == "buffer" and data.rank == 1:
        module.register_buffer("counts", torch.zeros(3))
    if differs == "shape":
        module.blocks.append(torch.nn.Linear(2, 2 + data.rank))
    try:
        ZeroDataParallel(module, data, ZeroConfig(stage))
    except DivergedRanks as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "differs"), [(0, "buffer"), (3, "buffer"), (1, "shape"), (2, "nothing")])
def test_ranks_that_wrap_different_modules_are_named(stage: int, differs: str):
    messages = run_ranks(2, wrap, stage, differs)
    if differs == "nothing":
        assert messages == ["", ""]
    else:
        counts = "8 parameters and 0 buffers", "8 parameters and 1 buffers"
        assert all("; build the same module on all ranks" in text for text in messages)
        assert all(differs != "buffer" or all(count in text for count in counts) for text in messages), messages


def build_branches(mesh: Mesh) -> Callable[[list[int]], None]:
    """Return a function that trains along a route, or unwraps without one."""
    model = ZeroDataParallel(Branches(), mesh.data, STAGE_3)

    def train(route: list[int]) -> None:
        if not route:
            model.unwrap()
        model(torch.ones(1, 16), route).backward()
        model.reducer.clear()

    return train


ALL = [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("num_same_steps", "routes"),
    [
        (0, [[0, 1, 2, 3], [0, 2, 1, 3]]),
        (4, [[0, 1, 2], [0, 1, 2, 3]]),
        (0, [[3, 2], [2, 3]]),
        (4, [[0, 1, 2, 3], [0, 1, 2, 3, 0]]),
    ],
)
def test_different_branches_are_named(num_same_steps, routes):
    messages = run_ranks(2, error_of, build_branches, [ALL] * num_same_steps + [routes], num_same_steps or 1)
    named = [text for text in messages if text.startswith("ranks took different branches of the model: ")]
    assert named
    assert all(text in named or text.startswith("ranks are at different points of a step: ") for text in messages)
    for text in named:
        assert re.search(r"data rank \d (gathers|reduces|begins).* then (gathers|reduces|begins)", text)
        predicted = re.search(r"; from the steps before, it is expected that a rank (gathers|reduces|begins) ", text)
        assert bool(predicted) == (num_same_steps > 0)
        assert "a ZeroConfig.stage below 3" in text


def build_generation(mesh: Mesh) -> Callable[[int], None]:
    """Return a function that runs a number of forwards without gradients."""
    model = ZeroDataParallel(Branches(), mesh.data, STAGE_3)

    def generate(num_forwards: int) -> None:
        with torch.no_grad():
            for _ in range(num_forwards):
                model(torch.ones(2, 16), [0, 1, 2, 3])

    return generate


def test_no_rank_of_several_groups_waits_for_one_that_has_generated_less():
    errors = run_ranks(4, error_of, build_generation, [[1], [0, 1, 2, 3]], 1, 2)
    assert [bool(text) for text in errors] == [False, True, True, True]


class Meetings:
    """The number of waits on the host and of comparisons by message since the last call."""

    def __init__(self, mesh: Mesh):
        self._log, self._num_waits = mesh.log, 0
        mesh.log.keeps_events = True

    def count_waits(self) -> AbstractContextManager[object]:
        def wait(barrier: HostBarrier, *arguments: Any) -> None:
            self._num_waits += 1
            original(barrier, *arguments)

        original = HostBarrier.wait
        return mock.patch.object(HostBarrier, "wait", wait)

    def take(self) -> tuple[int, int]:
        """Return (waits, comparisons)."""
        found = self._num_waits, sum(event.phase == "agreement" for event in self._log.events)
        self._num_waits = 0
        self._log.clear()
        return found


class Trainee:
    """A model whose steps are made of parts, each of which a letter stands for."""

    def __init__(self, config: ZeroConfig, mesh: Mesh):
        self.mesh = mesh
        self.model = ZeroDataParallel(Branches(), self.mesh.data, config)
        self.optimizer = ZeroOptimizer(self.model, torch.optim.SGD, lr=0.1)

    def run(self, parts: str) -> None:
        """Run a step: e evaluates; g does so on the first rank; a accumulates, 2 after two forwards; l is last."""
        for part in parts:
            if part == "e":
                with torch.no_grad():
                    self.forward()
            elif part == "g":
                with self.model.gathered(), torch.no_grad():
                    if self.mesh.data.rank == 0:  # alone, and along another route
                        self.forward([3, 3, 0])
            elif part == "l":
                self.forward().backward()
            else:
                with self.model.accumulate():
                    (self.forward() + (self.forward() if part == "2" else 0.0)).backward()
        self.optimizer.step()

    def forward(self, route: list[int] = ALL[0]) -> Tensor:
        return self.model(torch.ones(1, 16), route)


CHECKED = STAGE_2, STAGE_2_LOCAL, STAGE_3_REDUCE, STAGE_3_LOCAL = [
    ZeroConfig(stage, bucket_numel=500, prefetch_numel=600, accumulate=accumulate)
    for stage in (2, 3)
    for accumulate in ("reduce", "local")
]


def meetings_of(config: ZeroConfig, steps: list[str]) -> list[tuple[int, int]]:
    """Return how often ranks met in each step."""
    trainee = Trainee(config, Mesh.create(tensor_size=1))
    meetings = Meetings(trainee.mesh)
    with meetings.count_waits():
        return [(trainee.run(step), meetings.take())[1] for step in steps]


def test_an_order_that_repeats_is_not_compared():
    cases = [(config, ["eaalee"] * 3) for config in CHECKED]
    cases += [(config, [step] * 3) for config in (STAGE_3_REDUCE, STAGE_3_LOCAL) for step in ("22", "egalg")]
    for of_steps in itertools.chain(*run_cases(2, meetings_of, cases)):
        assert of_steps[-1] == (0, 0)


def test_an_evaluation_now_and_then_meets_twice():
    """Below stage 3 an evaluation communicates nothing. If only the last micro-batch does, nothing is compared."""
    steps = ["al", "al", "eeal", "al", "al", "eeal", "al", "al"]
    cases = [(config, steps) for config in (ZeroConfig(0), ZeroConfig(1), *CHECKED)]
    for (config, _), found in zip(cases, run_cases(2, meetings_of, cases), strict=True):
        for of_steps in found:
            expected = (1, 0) if config.stage == 3 else (0, 0)
            assert of_steps[-3:] == [expected, expected, (0, 0)]
            if config.stage < 2 or config == STAGE_2_LOCAL:
                assert set(of_steps) == {(0, 0)}


def build_parts(config: ZeroConfig, mesh: Mesh) -> Callable[[str], None]:
    """Return a function that runs the parts of a step."""
    return Trainee(config, mesh).run


@pytest.mark.parametrize(
    ("config", "num_same_steps", "parts", "named"),
    [
        (STAGE_2, 3, ["aal", "al"], ["begins a backward after 2", "steps the optimizer after 2"]),
        (STAGE_3_REDUCE, 0, ["aal", "al"], ["begins a forward after 2", "steps the optimizer after 2"]),
        (
            STAGE_3_LOCAL,
            3,
            ["al", "aal"],
            ["a backward whose gradients are reduced later after 1", "a backward after 1"],
        ),
        (STAGE_3_REDUCE, 3, ["eeal", "eal"], ["begins a forward after 0", "begins a backward after 0"]),
        (STAGE_3_REDUCE, 3, ["al", "gal"], ["gathers parameters to read them after 0", "begins a forward after 0"]),
    ],
)
def test_different_parts_of_a_step_are_named(config, num_same_steps, parts, named):
    steps = [["al", "al"]] * num_same_steps + [parts]
    for text in run_ranks(2, error_of, partial(build_parts, config), steps, num_same_steps or 1):
        assert text.startswith("ranks are at different points of a step: data rank ")
        assert all(name in text for name in named)
        assert "zero/uneven.py" in text


@pytest.mark.parametrize("usual", ["al", "eeal"])
def test_ranks_that_evaluate_different_numbers_of_batches_are_named_by_what_they_tell(usual):
    steps = [[usual]] * 3 + [["eeeal", "eeal"], ["never reached"]]
    for text in run_ranks(2, error_of, partial(build_parts, STAGE_3_REDUCE), steps, len(steps) - 1):
        assert text.startswith("ranks are at different points of a step: data rank ")
        assert "begins a forward after 0" in text
        assert "begins a backward after 0" in text


class BranchesOfRoot(Branches):
    """Blocks, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))


def build_reader(mesh: Mesh) -> Callable[[list[str]], None]:
    """Return a function that reads these parameters in one `gathered()`, and then runs a forward."""
    model = ZeroDataParallel(BranchesOfRoot(), mesh.data, STAGE_3)

    def read(names: list[str]) -> None:
        with model.gathered([model.module.get_parameter(name) for name in names]):
            pass
        model(torch.ones(1, 16), [0])

    return read


@pytest.mark.parametrize(
    ("more", "gathers", "is_first"),
    [("bias", "gathers the root", True), ("blocks.1.weight", "gathers blocks.1", False)],
)
def test_a_rank_that_reads_more_parameters_than_another_is_named(more, gathers, is_first):
    both, one = ["blocks.0.weight"], ["blocks.0.weight", more]
    for text in run_ranks(2, error_of, build_reader, [[one, both] if is_first else [both, one]], 1):
        assert text.startswith("ranks took different branches of the model: data rank ")
        assert f"gathers blocks.0, then {gathers}" in text
        assert "gathers blocks.0, then begins a forward after 0 micro-batches" in text


def test_a_rank_that_unwraps_alone_is_named():
    """The other one runs a forward."""
    steps = [[[], ALL[0]]]
    for text in run_ranks(2, error_of, build_branches, steps, 1):
        assert text.startswith("ranks are at different points of a step: ")
        assert "gathers parameters to read them after 0 micro-batches" in text


def leave() -> None:
    raise RuntimeError("closed by peer")


def errors_around_an_agreement() -> list[str]:
    """Return an error of a collective before the ranks agree again, and one after that."""
    barrier, texts = HostBarrier(Mesh.create(tensor_size=1).data), []
    report_reason("ranks differ")
    for purpose in ("eats", "sleeps"):
        with pytest.raises(RuntimeError) as caught:
            with_reason(leave)
        texts.append(str(caught.value))
        dist.barrier()  # both have read the reason
        barrier.wait(purpose)
    return texts


def test_the_reason_of_an_error_is_forgotten_when_the_ranks_agree_again():
    for before, after in run_ranks(2, errors_around_an_agreement):
        assert before.startswith("ranks differ (this rank waited")
        assert after == "closed by peer"


def keys_after_uses() -> list[int]:
    """Return how many more keys the store has after some uses of a barrier than after the second one."""
    data, store, found = Mesh.create(tensor_size=1).data, shared_store(), []
    barrier = HostBarrier(data)
    for _ in range(5):
        barrier.wait("eats")
        dist.barrier()  # all have gone on
        found.append(store.num_keys())
        dist.barrier()
    return [number - found[1] for number in found[2:]]


def test_a_barrier_that_is_used_again_leaves_no_more_keys_in_the_store():
    assert run_ranks(3, keys_after_uses) == [[0, 0, 0]] * 3
