"""A planner fills the room on the accelerator that the recorded steps have shown, to the last byte."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import PeakMeter
from parallel.mesh import Axis
from parallel.validation.errors import ConfigError, MemoryLimitError
from tests.twins import assert_same_bits, params_of
from zero.core.buckets.bucket import Bucket
from zero.core.protocols.extension import Extension
from zero.core.protocols.orders import ExecutionOrder
from zero.core.units.unit import Unit
from zero.data_parallel import ZeroDataParallel
from zero.homes.budget.planner import PlacementPlanner, UnitOrders, choose_units, place_optimizer_states
from zero.homes.budget.recorder import UPDATE, Moment
from zero.optimizer import ZeroOptimizer
from zero.settings.config import NO_OFFLOAD, OffloadConfig, ZeroConfig

CPU = torch.device("cpu")
NUMELS = [80, 144, 80]  # of the layers' units, with padding


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 4)])
        self.order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            layer = self.layers[index]
            x = layer(x[:, : layer.in_features]).tanh()
        return x.sum()


def wrapped(
    offload: OffloadConfig = NO_OFFLOAD, dtype: torch.dtype = torch.float32, **settings: str
) -> ZeroDataParallel:
    return ZeroDataParallel(Layers().to(dtype), Axis.trivial("data"), ZeroConfig(3, 4096, **settings), offload=offload)


def units_of_layers() -> list[Unit]:
    """Return the units; the last one has elements of 2 bytes, the others of 4."""
    module = Layers()
    module.layers[2].bfloat16()
    units = list(ZeroDataParallel(module, Axis.trivial("data"), ZeroConfig(3)).units.values())[1:]
    assert [unit.transient_numel for unit in units] == NUMELS
    return units


def orders_of(forward: Sequence[Unit], backward: Sequence[Unit]) -> UnitOrders:
    orders: UnitOrders = {"forward": ExecutionOrder(), "backward": ExecutionOrder()}
    for unit in forward:
        orders["forward"].record(unit)
    for unit in backward:
        orders["backward"].record(unit)
    return orders


@pytest.mark.parametrize(
    ("prefetch_numel", "room_bytes", "expected"),
    [
        (1000, 10**6, (304, True, 4 * (304 + 224))),  # all units are gathered ahead, and the last two are kept
        (200, 10**6, (200, True, 4 * (200 + 224))),
        (144, 10**6, (144, True, 4 * (144 + 224))),
        (143, 10**6, (0, True, 4 * 224)),  # the largest unit could not be gathered ahead
        (1000, 4 * 2 * 250, (250, True, 4 * (250 + 224))),  # half of the room
        (1000, 4 * 2 * 144, (144, False, 4 * 144)),
        (144, 4 * (144 + 224), (144, True, 4 * (144 + 224))),
        (144, 4 * (144 + 224) - 1, (144, False, 4 * 144)),
        (1000, 4 * 2 * 144 - 1, (0, True, 4 * 224)),
        (0, 4 * 224, (0, True, 4 * 224)),
        (0, 4 * 224 - 1, (0, False, 0)),
    ],
)
def test_units_are_prefetched_and_kept_as_far_as_there_is_room(prefetch_numel, room_bytes, expected):
    units = units_of_layers()
    assert choose_units(orders_of(units, units[::-1]), prefetch_numel, room_bytes) == expected


def placed(buckets: list[Bucket], room_bytes: int, *sizes: int) -> tuple[list[int], int]:
    """Return the places of the buckets whose optimizer states, of these bytes, are moved, and what they take."""
    found: list[int] = []
    taken = place_optimizer_states(
        buckets, room_bytes, lambda b: sizes[buckets.index(b)], lambda b: found.append(buckets.index(b))
    )
    return found, taken


def test_optimizer_states_leave_room_for_the_largest_gradient_that_is_cast():
    buckets = wrapped(OffloadConfig("host"), torch.bfloat16, accumulate_dtype="bf16").buckets
    for bucket in buckets:
        bucket.place_master(bucket.home)
    casts = [4 * numel for numel in NUMELS]
    assert placed(buckets, 350 + casts[1], 100, 200, 50) == ([0, 1, 2], 350 + casts[1])
    assert placed(buckets, 349 + casts[1], 100, 200, 50) == ([0, 1], 300 + casts[1])
    assert placed(buckets, 299 + casts[1], 100, 200, 50) == ([0], 100 + casts[1])
    assert placed(buckets, 99 + casts[0], 100, 200, 50) == ([], 0)


@pytest.mark.parametrize("mode", ["accelerator", "host", "auto"])
def test_a_budget_holds_the_two_largest_units_and_staged_gradients(mode):
    units, budget_bytes = units_of_layers(), 1000
    for staging_bytes in (104, 105):
        offload = OffloadConfig(mode, accelerator_memory_gb=budget_bytes / 1e9)
        planner = PlacementPlanner(offload, CPU)
        if staging_bytes == 104:  # 4 * (144 + 80) + 104 bytes
            planner.check_units(units, staging_bytes)
        else:
            with pytest.raises(ConfigError, match=r"two units and staged gradients alone take 1\.001e-06, 1e-09 more"):
                planner.check_units(units, staging_bytes)


def test_nine_tenths_of_the_accelerator_are_the_budget_of_auto(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1000))
    planner = PlacementPlanner(OffloadConfig("auto"), torch.device("cuda"))
    planner.check_units([], staging_bytes=900)
    with pytest.raises(ConfigError, match=r"accelerator_memory_gb=9e-07 is too small"):
        planner.check_units([], staging_bytes=901)


BUDGET = 10**6
CHUNKS = {"hidden_dim": 16, "min_chunk_size_m": 256 / 2**20, "search_range_m": 0.0}
SHARD_BYTES = [4 * numel for numel in NUMELS]
UNIT_BYTES = 4 * (304 + 80)  # all units are gathered ahead, and the root and the last layer are kept


def within_budget(
    mode: str = "auto", kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    chunks = CHUNKS if mode == "auto" else {}
    model = wrapped(OffloadConfig(mode, accelerator_memory_gb=BUDGET / 1e9, **chunks))
    return model, ZeroOptimizer(model, kind, lr=0.1)


def planner_of(model: ZeroDataParallel) -> PlacementPlanner:
    return next(each for each in model.extensions if isinstance(each, PlacementPlanner))


@pytest.mark.parametrize(("mode", "expected"), [("accelerator", (7, True)), ("host", (7, True)), ("auto", (0, False))])
def test_nothing_is_prefetched_or_kept_before_there_is_a_plan(mode: str, expected: tuple[int, bool]):
    offload = OffloadConfig(mode, accelerator_memory_gb=BUDGET / 1e9, **CHUNKS)
    model = ZeroDataParallel(Layers(), Axis.trivial("data"), ZeroConfig(3, prefetch_numel=7), offload=offload)
    assert (model.residency.prefetch_numel, model.residency.may_keep) == expected


def test_chunks_have_lengths_that_buckets_can_have(caplog: pytest.LogCaptureFixture):
    offload = OffloadConfig("auto", accelerator_memory_gb=BUDGET / 1e9, **(CHUNKS | {"min_chunk_size_m": 90 / 2**20}))
    with caplog.at_level("INFO", "zero.data_parallel"):
        model = ZeroDataParallel(Layers(), Axis.trivial("data"), ZeroConfig(3, alignment=256), offload=offload)
    (numel,) = {len(bucket.ranges.elements) for bucket in model.buckets}
    assert caplog.messages == [f"offload: chunks of {numel} elements, 0 unfilled"]


def measure(monkeypatch: pytest.MonkeyPatch, peak_bytes: Callable[[], int]) -> None:
    monkeypatch.setattr(PeakMeter, "peak_bytes", lambda _meter: peak_bytes())


def cached_bytes(model: ZeroDataParallel) -> int:
    return sum(bucket.params.cached.nbytes for bucket in model.buckets if bucket.params.cached is not None)


def test_shards_that_have_no_room_in_the_update_are_evicted_before_it(monkeypatch: pytest.MonkeyPatch):
    """Everywhere else there is room for all of them."""
    model, optimizer = within_budget()
    measure(monkeypatch, lambda: BUDGET if planner_of(model).recorder.moment == UPDATE else 0)
    found = []
    for _ in range(4):
        model(torch.ones(2, 8)).backward()
        found.append(cached_bytes(model))
        optimizer.step()
        found.append(cached_bytes(model))
    assert found == [0, 0, 0, 0, sum(SHARD_BYTES), 0, sum(SHARD_BYTES), 0]


@pytest.mark.parametrize(
    ("room_bytes", "moment_without_room", "most_bytes"),
    [
        (SHARD_BYTES[1], ("forward", 2), SHARD_BYTES[1]),
        (SHARD_BYTES[1], ("backward", 2), SHARD_BYTES[1]),
        (SHARD_BYTES[1], ("backward", 0), SHARD_BYTES[1]),
        # Half of the room is for elements that are gathered ahead, and 320 bytes for the last layer, which is kept.
        (4 * SHARD_BYTES[0], None, SHARD_BYTES[0]),
    ],
)
def test_shards_are_cached_in_the_room_that_each_moment_has(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int, moment_without_room: Moment | None, most_bytes: int
):
    """The root is visited first. The shard of the second layer is used later than that of the first."""
    model, optimizer = within_budget()
    model.module.order = (0, 1, 0, 1, 2)
    recorder = planner_of(model).recorder
    measure(monkeypatch, lambda: BUDGET - (0 if recorder.moment == moment_without_room else room_bytes))
    found: list[tuple[Moment, int]] = []

    def note(*_: object) -> None:
        found.append((recorder.moment, cached_bytes(model)))

    def after_forward(_module: nn.Module, _args: tuple, output: Tensor) -> None:
        note()
        output.register_hook(note)

    for layer in model.module.layers:
        layer.register_forward_hook(after_forward)

    class Noting(Extension):
        def on_launch(self, kind: str, _number: int) -> None:
            if kind == "gather":
                note()

    for step in range(4):
        if step == 2:
            assert {num_bytes for _, num_bytes in found} == {0}
            found.clear()
        with model.extended(Noting()):
            model(torch.ones(2, 8)).backward()
        optimizer.step()
    assert all(num_bytes == 0 for moment, num_bytes in found if moment == moment_without_room)
    assert max(num_bytes for _, num_bytes in found) == most_bytes


def test_nothing_is_cached_in_a_step_that_does_not_follow_the_plan(monkeypatch: pytest.MonkeyPatch):
    model, optimizer = within_budget()
    measure(monkeypatch, lambda: 0)
    found = []
    for step in range(5):
        if step == 3:
            model.module.layers[1](torch.ones(2, 8)).sum().backward()
        else:
            model(torch.ones(2, 8)).backward()
        found.append(cached_bytes(model))
        optimizer.step()
    assert found == [0, 0, sum(SHARD_BYTES), 0, sum(SHARD_BYTES)]


def test_what_is_written_reaches_shards_in_the_cache(monkeypatch: pytest.MonkeyPatch):
    model, optimizer = within_budget()
    measure(monkeypatch, lambda: 0)
    for _ in range(3):
        model(torch.ones(2, 8)).backward()
        optimizer.step()
    assert cached_bytes(model) == sum(SHARD_BYTES)
    with model.gathered(modify=True):
        for param in model.module.parameters():
            param.fill_(0.5)
    assert all(values.eq(0.5).all() for values in params_of(model).values())


def test_shards_that_an_evaluation_has_cached_are_updated(monkeypatch: pytest.MonkeyPatch):
    losses = []
    for context in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model, optimizer = within_budget()
        measure(monkeypatch, lambda: 0)
        for step in range(4):
            if step == 2:  # the first step by the plan
                with context():
                    model(torch.ones(2, 8))
                assert cached_bytes(model) == sum(SHARD_BYTES)
            loss = model(torch.ones(2, 8))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_the_optimizers_states_get_what_units_and_shards_leave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """States of SGD: fp32 gradients and weights of a shard."""
    state_bytes = [2 * num_bytes for num_bytes in SHARD_BYTES]
    room_bytes = UNIT_BYTES + sum(SHARD_BYTES) + sum(state_bytes)
    for spare, num_placed in ((0, 3), (-1, 2)):
        model, optimizer = within_budget()
        measure(monkeypatch, lambda spare=spare: BUDGET - room_bytes - spare)
        with caplog.at_level("INFO", "zero.homes.budget.planner"):
            for _ in range(2):
                model(torch.ones(2, 8)).backward()
                optimizer.step()
        assert sum(not bucket.home.is_apart for bucket in model.buckets) == num_placed
        assert (model.residency.prefetch_numel, model.residency.may_keep) == (304, True)
        found = re.search(
            r"offload: (\S+) of 0\.001 GB are free at the tightest moment; (\S+) for units that are prefetched or "
            rf"kept, (\S+) for the optimizer's states of {num_placed} of 3 buckets",
            caplog.messages[-1],
        )
        assert found, caplog.messages
        expected = [room_bytes + spare, UNIT_BYTES, sum(state_bytes[:num_placed])]
        assert [1e9 * float(number) for number in found.groups()] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("mode", "moment"), [("accelerator", ("forward", 1)), ("host", ("backward", 2)), ("auto", UPDATE)]
)
def test_a_budget_that_is_exceeded_ends_the_first_step_before_its_update(
    monkeypatch: pytest.MonkeyPatch, mode: str, moment: Moment
):
    model, optimizer = within_budget(mode)
    measure(monkeypatch, lambda: BUDGET + (10**6 if planner_of(model).recorder.moment == moment else 0))
    before = params_of(model)
    model(torch.ones(2, 8)).backward()
    where = f"{moment[0]} visit {moment[1]}"
    message = (
        r"^OffloadConfig\.accelerator_memory_gb=0\.001 cannot be kept: this rank needs 0\.002 GB in "
        rf"{where}, and the rank that needs most 0\.001 GB too much; "
    )
    with pytest.raises(MemoryLimitError, match=message):
        optimizer.step()
    assert_same_bits(params_of(model), before)


def test_memory_of_an_update_counts_in_its_step_and_memory_from_before_the_first_forward_does_not():
    class Large(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            torch.empty(BUDGET)
            return super().step(closure)

    with MemoryTracker(CPU):
        torch.empty(BUDGET)
        model, optimizer = within_budget("accelerator")
        for _ in range(3):
            model(torch.ones(2, 8)).backward()
            optimizer.step()
        model, optimizer = within_budget("accelerator", Large)  # the first step is enough
        model(torch.ones(2, 8)).backward()
        with pytest.raises(MemoryLimitError, match="in update visit 0"):
            optimizer.step()
