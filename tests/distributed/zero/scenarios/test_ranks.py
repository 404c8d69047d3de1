"""Differences from rank to rank: how many batches there are, and which parameters a rank uses."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.validation.errors import ConfigError
from tests.procedures import With, choosing, trains_parts
from tests.scenarios import STAGES, WIDTH, Block, Blocks, Model, Run, as_test, cases, mean_square
from zero import Muon, ZeroDataParallel, ZeroOptimizer, load, save, uneven


def batches_of(run: Run, rank: int) -> list[Tensor]:
    """Return the batches of a rank: rank r has 2 + r of them, and the last rank has one."""
    num_batches = 1 if rank == run.num_ranks - 1 else 2 + rank
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(num_batches)]


def uneven_steps(run: Run) -> Iterator[list[tuple[Tensor, float]]]:
    """Iterate over the steps: each is a list of batches with weights, of all ranks or of this one.

    The loss of a step is a mean over all ranks, to which one without a batch adds zero.
    """
    if not run.is_plain:
        yield from ([item] for item in uneven.join(iter(batches_of(run, run.data.rank)), run.data))
        return
    for batches in itertools.zip_longest(*(batches_of(run, rank) for rank in range(run.num_ranks))):
        yield [(batch, 1 / run.num_ranks) for batch in batches if batch is not None]


def uneven_batches(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    num_steps = 0
    for step in uneven_steps(run):
        optimizer.zero_grad()
        for batch, weight in step:
            (mean_square(model, batch) * weight).backward()
        optimizer.step()
        num_steps += 1
    assert num_steps == max(len(batches_of(run, rank)) for rank in range(run.num_ranks))


class Experts(nn.Module):
    """A layer whose rows choose an expert by their first element, if there is no `number`: ranks use other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.number = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.number is not None:
            return x + self.experts[self.number](x)
        choice = (x[:, 0] * 3).long().abs() % len(self.experts)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := (choice == number).nonzero().flatten()).numel():
                output = output.index_add(0, rows, expert(x[rows]))
        return x + output


def mixture(run: Run) -> Model:
    """Return a model whose units contain all experts of a layer, since ranks use experts of their own."""
    return run.wrap(Blocks(Experts(), Experts()), **({"units": ("blocks.*",)} if run.shards_parameters else {}))


def experts(run: Run) -> None:
    model = mixture(run)
    run.train(model, run.optimizer(model), steps=range(4))


def unused_experts(run: Run) -> None:
    for kind, of_kind in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        model = mixture(run)
        optimizer = run.optimizer(model, kind, skip_unused=True, lr=0.1, weight_decay=0.5, **of_kind)
        for step in range(4):
            ranks = range(run.num_ranks) if run.is_plain else [run.data.rank]
            for rank, part in zip(ranks, run.parts(step), strict=True):
                first, second = model.module.blocks
                first.number = (step + rank % 2) % 3  # of two experts, the third is not used
                second.number = 2 - first.number
                (mean_square(model, part) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_parameter_without_a_gradient_warns_once_unless_it_is_skipped():
    for skips in (False, True):
        model = ZeroDataParallel(Blocks(Experts(), Experts()))
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, skip_unused=skips)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.module.head(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
        assert [warning.filename for warning in caught] == [__file__] * (not skips)
        assert skips or "14 of 16 parameters, such as embed.weight" in str(caught[0].message)
    del optimizer
    with pytest.raises(ConfigError, match=r"skip_unused=True .* matrices"):
        ZeroOptimizer(model, Muon, [model.module.head.weight], skip_unused=True)


def test_a_checkpoint_has_no_states_of_what_was_never_used_and_a_load_removes_later_ones(tmp_path):
    def step(use: nn.Module) -> None:
        use(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = ZeroDataParallel(nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in ("used", "later")}))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, skip_unused=True)
    step(model.module["used"])
    folder = save(tmp_path / "saved", model, optimizer)
    step(model.module["later"])
    load(folder, model, optimizer)
    weights = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    states = [state for state in optimizer.inner.state.values() if state]
    assert len(states) == 2  # weight and bias
    step(model.module["later"])  # as a first update: by the learning rate, against the gradient's sign
    rate, decay = optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
    expected = weights["later.weight"] * (1 - rate * decay) - rate
    torch.testing.assert_close(model.module["later"].weight.detach(), expected)


def a_micro_batch_that_reaches_no_parameter(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        with model.accumulate():
            losses = [mean_square(model, part) / len(run.parts(step)) for part in run.parts(step)]
            for loss in losses[1:] if run.is_plain else losses[: run.data.rank]:  # all but that of the first rank
                loss.backward()
        run.record(mean_square(model, run.batch(10 + step))).backward()
        optimizer.step()


class Branches(Blocks):
    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.embed(x)
        return self.head(self.blocks[rank % 2](x) if rank % 2 else self.blocks[0](self.blocks[1](x)))


def different_parameters_or_none(run: Run) -> None:
    model, optimizer = run.start(Branches())
    for step in range(4):
        optimizer.zero_grad()
        ranks = range(run.num_ranks) if run.is_plain else [run.data.rank]
        for rank, part in zip(ranks, run.parts(step), strict=True):
            if step == 3 and rank == 0:
                loss = torch.zeros((), requires_grad=True) * 1.0  # this rank's loss reaches no parameter
            else:
                loss = (model(part, rank) - 0.5).square().mean()
            (loss / len(ranks)).backward()
        optimizer.step()


def repeat(m: Any, x: Tensor) -> Tensor:
    for _ in range(m.times):
        x = m.block(x)
    return x


def repeat_by_rank(model: Model, x: Tensor, rank: int) -> Tensor:
    model.module.blocks[1].times = rank + 1
    return mean_square(model, x)


def choose_by_rank(model: Model, x: Tensor, rank: int) -> Tensor:
    for block in model.module.blocks:
        block.choice = rank % 2
    return mean_square(model, x)


TABLE = {
    "uneven-data": cases(uneven_batches, few=STAGES),
    "ranks-in-a-unit": cases(
        experts,
        {
            "Qwen3-VL#126: ranks repeat a module inside a unit": trains_parts(
                lambda: Blocks(Block(), With(repeat, block=Block(), times=1)), repeat_by_rank
            ),
            "pytorch#158719, pytorch#174862: ranks use other parameters": trains_parts(
                lambda: Blocks(choosing(), choosing()), choose_by_rank
            ),
        },
    ),
    "ranks-of-other-units": cases(different_parameters_or_none, stages=[0, 1, 2], few=STAGES[:3])
    | cases(a_micro_batch_that_reaches_no_parameter, stages=[2], few=[STAGES[2]]),
    "unused-parameters": cases(unused_experts),
}

test_scenario = as_test(__name__, TABLE)
