"""Scenarios: training procedures as a user of plain torch writes them, which must give the same values in every stage.

    one process    the procedure with plain torch, on whole batches
    each rank      the same procedure with ZeRO, on its rows of each batch, under one configuration after the other

A loss must be a mean over the rows of a batch; for any other loss, a procedure iterates over the `parts` of a batch.
A module of tests has a table of rows, which are promises of docs/zero_library.md: a row's id is its test's, and it has
procedures as cases.
"""

import importlib
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import Axis, Mesh
from tests.pairwise import noting
from tests.ranks import run_ranks
from zero.core.partition.stage import Lifetime
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

ROWS, WIDTH = 3, 4  # of this rank's part of a batch
LARGEST = 100.0  # value in a scenario
TOLERANCE = 1e-10  # float64: rounding is about 1e-16, and the steps are few and small


@dataclass(frozen=True)
class Configuration:
    """A way to divide the model states over the ranks. Shard groups have two of four ranks."""

    stage: int
    accumulate: str = "reduce"
    offloads: bool = False
    has_groups: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return 4 if self.has_groups else 2

    @property
    def zero(self) -> ZeroConfig:
        return ZeroConfig(self.stage, **{"bucket_numel": 100, "accumulate": self.accumulate} | self.settings)

    @property
    def offload(self) -> OffloadConfig:
        return OffloadConfig("host") if self.offloads else NO_OFFLOAD


STAGES = [Configuration(0), Configuration(1, settings={"overlap_gather": True}), Configuration(2), Configuration(3)]
ALL = [
    *(
        Configuration(stage, accumulate, offloads)
        for stage, accumulate, offloads in itertools.product(range(4), ("reduce", "local"), (False, True))
        if accumulate == "reduce" or stage >= 2
    ),
    *(Configuration(stage, settings={"bucket_numel": 20}) for stage in range(4)),
    *(Configuration(stage, settings={"overlap_gather": True}) for stage in (0, 1, 2)),
    Configuration(2, offloads=True, settings={"overlap_gather": True}),
    *(Configuration(3, settings=settings) for settings in ({"prefetch_numel": 0}, {"resident_numel": 5})),
    *(Configuration(stage, has_groups=True) for stage in (1, 2, 3)),
    Configuration(3, "local", offloads=True, has_groups=True),
]


class PlainModel(nn.Module):
    """The interface of ZeroDataParallel around a module that plain torch trains."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[nn.Module]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not modify):
            yield self.module

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        assert callable(getattr(module or self.module, name))

    def unwrap(self, device: torch.device | None = None) -> nn.Module:
        return self.module


class PlainOptimizer(torch.optim.Optimizer):
    """Torch optimizers with the interface of ZeroOptimizer.

    A parameter without a gradient has a gradient of zero, unless `skip_unused`.
    """

    def __init__(self, inners: Sequence[torch.optim.Optimizer], clip_norm: float, *, skip_unused: bool = False):
        super().__init__([group for inner in inners for group in inner.param_groups], inners[0].defaults)
        self.inners, self.clip_norm, self.skip_unused = inners, clip_norm, skip_unused

    @property
    def inner(self) -> torch.optim.Optimizer:
        (inner,) = self.inners
        return inner

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for group in self.param_groups:
            yield from (("", param.grad) for param in group["params"])

    def step(  # type: ignore[override]
        self, closure: Callable[[], Tensor] | None = None, *, gradient_hook: Callable[[], object] = lambda: None
    ) -> Tensor:
        loss = closure() if closure else None
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        for param in () if self.skip_unused else params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        gradient_hook()
        norm = torch.nn.utils.clip_grad_norm_(params, self.clip_norm)
        for inner in self.inners:
            inner.step()
        return norm if loss is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for inner in self.inners:
            inner.zero_grad(set_to_none)


Model = ZeroDataParallel | PlainModel
Optimizer = ZeroOptimizer | PlainOptimizer
Loss = Callable[[Model, Tensor], Tensor]


class Run:
    """One run of a procedure: with plain torch if there is no configuration, else on one of its ranks."""

    def __init__(self, configuration: Configuration | None, data: Axis):
        self.configuration, self.data, self.num_ranks = configuration, data, data.size
        self.recorded: list[Tensor] = []
        self.models: dict[nn.Module, Model] = {}
        self.initial: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}
        self.optimizers: list[Optimizer] = []

    @property
    def is_plain(self) -> bool:
        return self.configuration is None

    @property
    def shards_parameters(self) -> bool:
        return self.configuration is not None and self.configuration.zero.policy.full_params is Lifetime.TRANSIENT

    def wrap(self, module: nn.Module, **settings: Any) -> Model:
        """Return the model; `settings` are those of ZeroConfig."""
        if self.configuration is None:
            self.models[module] = PlainModel(module)
            self.initial[module] = {param: param.detach().clone() for param in module.parameters()}
        else:
            config = Configuration(**vars(self.configuration) | {"settings": self.configuration.settings | settings})
            self.models[module] = ZeroDataParallel(module, self.data, config.zero, offload=config.offload)
        return self.models[module]

    def optimizer(
        self,
        model: Model,
        kind: "type[torch.optim.Optimizer] | list[torch.optim.Optimizer]" = torch.optim.SGD,
        groups: list[dict[str, Any]] | None = None,
        *,
        clip_norm: float = math.inf,
        skip_unused: bool = False,
        **settings: Any,
    ) -> Optimizer:
        """Return an optimizer, by default one whose updates are proportional to the gradients."""
        if isinstance(kind, list):
            return self.of_list(model, kind, clip_norm, skip_unused)
        settings = settings or ({"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.01})
        if isinstance(model, PlainModel):
            return self.of_list(model, [kind(groups or model.parameters(), **settings)], clip_norm, skip_unused)
        self.optimizers.append(
            ZeroOptimizer(model, kind, groups, clip_norm=clip_norm, skip_unused=skip_unused, **settings)
        )
        return self.optimizers[-1]

    def of_list(
        self,
        model: Model,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_norm: float = math.inf,
        skip_unused: bool = False,
    ) -> Optimizer:
        """Return an optimizer that steps all of `optimizers`."""
        if isinstance(model, PlainModel):
            self.optimizers.append(PlainOptimizer(optimizers, clip_norm, skip_unused=skip_unused))
        else:
            self.optimizers.append(ZeroOptimizer(model, optimizers, clip_norm=clip_norm, skip_unused=skip_unused))
        return self.optimizers[-1]

    def batch(self, step: int, *shape: int) -> Tensor:
        """Return the batch of a step: all of its rows in one process, else those of this rank."""
        parts = self._all_parts(step, shape or (ROWS, WIDTH))
        return torch.cat(parts) if self.is_plain else parts[self.data.rank]

    def parts(self, step: int, *shape: int) -> list[Tensor]:
        """Return the parts of all ranks in one process, else that of this rank. Divide losses by their number."""
        parts = self._all_parts(step, shape or (ROWS, WIDTH))
        return parts if self.is_plain else [parts[self.data.rank]]

    def record(self, value: Tensor) -> Tensor:
        """Compare the mean of `value` over the ranks with the value in one process; return it."""
        self.recorded.append(value.detach().clone())
        return value

    def train(
        self, model: Model, optimizer: Optimizer, loss: "Loss | None" = None, steps: Iterable[int] = (0, 1)
    ) -> None:
        """Train as plain torch does, one batch a step."""
        for step in steps:
            optimizer.zero_grad()
            self.record((loss or mean_square)(model, self.batch(step))).backward()
            optimizer.step()

    def start(self, module: nn.Module, *arguments: Any, **settings: Any) -> tuple[Model, Optimizer]:
        """Wrap a module; return the model and an optimizer that has these arguments."""
        model = self.wrap(module)
        return model, self.optimizer(model, *arguments, **settings)

    def train_module(self, module: nn.Module, loss: "Loss | None" = None, steps: Iterable[int] = (0, 1)) -> None:
        """Wrap a module and train it."""
        self.train(*self.start(module), loss, steps)

    def results(self) -> dict[str, Tensor]:
        """Return what was recorded, averaged over the ranks, and all parameters."""
        results = {}
        for number, value in enumerate(self.recorded):
            if not self.is_plain:
                dist.all_reduce(value)
                value /= self.num_ranks
            results[f"recorded {number}"] = value
        for number, model in enumerate(self.models.values()):
            self._check_all_is_done(model)
            with model.gathered() as module:
                params = {f"model {number}: {name}": p.detach().clone() for name, p in module.named_parameters()}
            results |= params
        return results

    def _all_parts(self, step: int, shape: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return list(torch.randn(self.num_ranks, *shape, generator=generator, dtype=torch.float64).to(_dtype()))

    def _check_all_is_done(self, model: Model) -> None:
        """Check that the model was trained, that no update was skipped, and that no unit stays gathered."""
        if isinstance(model, PlainModel):
            initial = self.initial[model.module]
            is_frozen = not any(param.requires_grad for param in initial)
            assert is_frozen or any(not param.equal(initial[param]) for param in initial), "nothing was trained"
            return
        assert all(optimizer.num_skipped == 0 for optimizer in self.optimizers), "an update was skipped"
        model.before_step(())  # what stays gathered until the step
        transient = [flat for flat in model.flats if flat.lifetime is Lifetime.TRANSIENT]
        assert all(flat.is_sharded for flat in transient), "a unit is still gathered"


def _dtype() -> torch.dtype:
    return torch.get_default_dtype()


def mean_square(model: Model, x: Tensor) -> Tensor:
    """Return a loss that depends on all elements of the output."""
    return (model(x) - 0.5).square().mean()


Procedure = Callable[[Run], None]


@dataclass(frozen=True)
class Case:
    """A procedure and the stages in which it equals one process; `few` instead of a choice of configurations."""

    procedure: Procedure
    stages: Collection[int] = (0, 1, 2, 3)
    tolerance: float = TOLERANCE
    dtype: torch.dtype = torch.float64
    few: Sequence[Configuration] = ()

    def configurations(self, name: str, is_full: bool) -> list[Configuration]:
        """Return all configurations of the stages, or stage 3 and for every second case one of the others too."""
        every = [configuration for configuration in ALL if configuration.stage in self.stages]
        if is_full or self.few:
            return every if is_full else list(self.few)
        last = [configuration for configuration in every if configuration == Configuration(3)]
        others = [configuration for configuration in every if configuration not in last]
        number = zlib.crc32(name.encode())
        return last + (others[number // 2 % len(others) :][:1] if number % 2 or not last else [])


Row = dict[str, Case]  # with the name of each case; a number of a thread is that of a user's report
Table = dict[str, Row]  # the ids of rows are those of the tables of docs/zero_library.md, "Any module"


def cases(*procedures: Procedure | dict[str, Procedure], **options: Any) -> Row:
    """Return cases of a row; a function gives its case its name. `options` are those of Case."""
    named: dict[str, Procedure] = {}
    for item in procedures:
        named |= item if isinstance(item, dict) else {item.__name__: item}
    return {name: Case(procedure, **options) for name, procedure in named.items()}


def as_test(module_name: str, table: Table) -> Callable[..., None]:
    """Make a test of each row of a module's `TABLE`: its cases on as many ranks run in one call, one after another."""

    @pytest.mark.parametrize(
        "is_full", [pytest.param(False, id="few"), pytest.param(True, id="all", marks=pytest.mark.full)]
    )
    @pytest.mark.parametrize("row", table)
    def test(row: str, is_full: bool) -> None:
        chosen = [(name, c) for name, case in table[row].items() for c in case.configurations(name, is_full)]
        for num_ranks in (2, 4):
            if alike := [(name, c) for name, c in chosen if c.num_ranks == num_ranks]:
                run_ranks(num_ranks, check, module_name, row, alike, timeout_seconds=600.0 + 10 * len(alike))

    return test


def check(module_name: str, row: str, chosen: Sequence[tuple[str, Configuration]]) -> None:
    """Run cases of a row on this rank: in one process, which must change the parameters, then as configured."""
    data = Mesh.create(tensor_size=1, shard_size=2 if chosen[0][1].has_groups else None).data
    for name, of_case in itertools.groupby(chosen, key=lambda pair: pair[0]):
        case: Case = importlib.import_module(module_name).TABLE[row][name]
        torch.set_default_dtype(case.dtype)
        with noting(name):
            expected = results_of(case.procedure, None, data)
            # Small numbers: a difference of TOLERANCE is then a mistake, and not a rounding.
            assert all((value.abs() < LARGEST).all() for value in expected.values()), "it diverges in one process"
            for _, configuration in of_case:
                with noting(configuration):
                    found = results_of(case.procedure, configuration, data)
                    torch.testing.assert_close(found, expected, rtol=case.tolerance, atol=case.tolerance)


def results_of(procedure: Procedure, configuration: Configuration | None, data: Axis) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run = Run(configuration, data)
    procedure(run)
    return run.results()


class Block(nn.Module):
    """A residual block, which is a unit, with a parameter of its own and a method that `forward` calls."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 2), nn.Linear(width + 2, width)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale).tanh())


class Blocks(nn.Module):
    """An embedding, some blocks and a head; `encode` is the model without its head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.head = nn.Linear(WIDTH, 2)

    def encode(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))
