"""Differences from rank to rank: how many batches there are, and which parameters a rank uses."""

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from parallel.validation.errors import ConfigError
from tests.scenarios import DEFAULT, GROUPS, HOST, WIDTH, Blocks, Configuration, Run, mean_square, scenario
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


@scenario(DEFAULT + GROUPS)
def test_ranks_run_out_of_batches_at_different_steps(run: Run) -> None:
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
    """A layer whose rows choose an expert by their first element: some ranks use experts that others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] * 3).long().abs() % len(self.experts)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := (choice == number).nonzero().flatten()).numel():
                output = output.index_add(0, rows, expert(x[rows]))
        return x + output


class Mixture(Blocks):
    def __init__(self) -> None:
        super().__init__(Experts(), Experts())


@scenario(DEFAULT + GROUPS)
def test_ranks_use_experts_of_their_own_if_a_unit_contains_them_all(run: Run) -> None:
    settings = {"units": ("blocks.*",)} if run.shards_parameters else {}
    model = run.wrap(Mixture(), **settings)
    run.train(model, run.optimizer(model), steps=range(4))


class Chosen(Experts):
    def forward(self, x: Tensor, number: int) -> Tensor:
        return x + self.experts[number](x)


class ChosenMixture(Blocks):
    def __init__(self) -> None:
        super().__init__(Chosen(), Chosen())

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.embed(x)
        return self.head(self.blocks[1](self.blocks[0](x, number), 2 - number))


@scenario(DEFAULT + HOST + GROUPS)
def test_experts_that_no_rank_used_are_not_updated(run: Run) -> None:
    settings = {"units": ("blocks.*",)} if run.shards_parameters else {}
    for kind, of_kind in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        model = run.wrap(ChosenMixture(), **settings)
        rest = [param for name, param in model.module.named_parameters() if not name.startswith("blocks.1.")]
        groups = [{"params": rest}], [{"params": list(model.module.blocks[1].parameters())}]
        optimizers = [
            run.optimizer(model, kind, list(part), skip_unused=True, lr=0.1, weight_decay=0.5, **of_kind)
            for part in groups
        ]
        for step in range(4):
            ranks = range(run.num_ranks) if run.is_plain else [run.data.rank]
            for rank, part in zip(ranks, run.parts(step), strict=True):
                number = (step + rank % 2) % 3  # of two experts, the third is not used
                ((model(part, number) - 0.5).square().mean() / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_a_parameter_without_a_gradient_warns_once_unless_it_is_skipped():
    for skips in (False, True):
        model = ZeroDataParallel(Mixture())
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, skip_unused=skips)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.module.head(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
        assert [warning.filename for warning in caught] == [__file__] * (not skips)
        assert skips or "14 of 16 parameters, such as embed.weight" in str(caught[0].message)
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


@scenario([Configuration(2)])
def test_a_micro_batch_of_a_rank_reaches_no_parameter(run: Run) -> None:
    model, optimizer = run.start(Blocks())
    for step in range(2):
        optimizer.zero_grad()
        with model.accumulate():
            losses = [mean_square(model, part) / len(run.parts(step)) for part in run.parts(step)]
            for loss in losses[1:] if run.is_plain else losses[: run.data.rank]:  # all but that of the first rank
                loss.backward()
        run.record(mean_square(model, run.batch(10 + step))).backward()
        optimizer.step()


@scenario([configuration for configuration in DEFAULT if configuration.stage < 3])
def test_ranks_use_different_parameters_or_none(run: Run) -> None:
    class Branches(Blocks):
        def forward(self, x: Tensor, rank: int) -> Tensor:
            x = self.embed(x)
            return self.head(self.blocks[rank % 2](x) if rank % 2 else self.blocks[0](self.blocks[1](x)))

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
