"""With `overlap_gather` the gathers of an update run on in the next forward, and each reader waits for its own."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh import Axis, Mesh
from tests.ranks import run_ranks
from zero.checkpoint.rank_state import RankState
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig


class Model(nn.Module):
    """A model whose parameters are in the order in which they are read. The last product reads the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.bias = nn.Parameter(torch.zeros(5))  # of the model itself: it is waited for before anything runs

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x) @ self.embedding.weight.t() + self.bias


class NothingSaved:
    """A saved state without a value: what is loaded from it stays as it is."""

    def state_kinds(self, name: str) -> list[str]:
        return []

    def read(self, *_: object, **__: object) -> None: ...

    def load_by_name(self, *_: object) -> None: ...


READERS = ["", "embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
READS: dict[str, Callable[[ZeroDataParallel, ZeroOptimizer], object]] = {
    "forward": lambda model, _: model(torch.arange(5)),
    "a call outside the wrapper": lambda model, _: model.module(torch.arange(5)),
    "a part": lambda model, _: model.module.blocks[1](torch.ones(2, 6)),
    "one parameter": lambda model, _: model.module.blocks[1][0].weight.sum(),
    "a kept list": lambda model, _: [param.detach() for param in list(model.parameters())],
    "a state dict": lambda model, _: model.module.state_dict(),
    "gathered": lambda model, _: model.gathered().__enter__(),
    "unwrapped": lambda model, _: model.unwrap(),
    "all updates": lambda model, _: model.wait_for_updates(),
    "changes": lambda _, optimizer: optimizer.take_changes(),
    "placement": lambda model, optimizer: optimizer.place(optimizer.buckets[0], model.homes.accelerator),
    "saved state": lambda model, optimizer: RankState(model, optimizer).load_owned(NothingSaved()),
    "nothing": lambda *_: None,
}


def reader_of(name: str) -> int:
    """Return the place in `READERS` of the module that waits for a parameter."""
    return max((n for n, reader in enumerate(READERS) if name.startswith(reader) and reader), default=0)


def waits_for_gathers(
    mesh: Mesh, stage: int, overlaps: bool, read: str
) -> tuple[list[int | None], list[set[int]], list[Tensor]]:
    """Return how many of `READERS` had begun to run when each gather was waited for, and which of them read it."""
    torch.manual_seed(1)
    module = Model()
    begun: list[str] = []
    for name in READERS:
        module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: begun.append(name))
    model = ZeroDataParallel(module, mesh.data, ZeroConfig(stage, bucket_numel=28, overlap_gather=overlaps))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, fused=True)
    model(torch.arange(5)).square().sum().backward()
    begun.clear()
    with mesh.log.keeping_events(lambda: len(begun)) as events:
        optimizer.step()
        begun.append("step")
        READS[read](model, optimizer)
    gathers = [event for event in events if event.op == "all_gather" and event.phase != "agreement"]
    del gathers[len(model.buckets) :]  # those of what has been loaded
    names = {param: name for name, param in module.named_parameters()}
    readers = [{reader_of(names[param]) for param in bucket.grads.parts} for bucket in model.buckets]
    waits = [None if gather.awaited is None else int(gather.awaited) - 1 for gather in gathers]
    return waits, readers, [param.detach().clone() for param in module.parameters()]


def all_waits() -> dict[tuple[int, bool, str], tuple[list[int | None], list[set[int]], list[Tensor]]]:
    mesh = Mesh.create(tensor_size=1)
    cases = [(1 + number % 2, True, read) for number, read in enumerate(READS)]
    return {case: waits_for_gathers(mesh, *case) for case in [(1, False, "nothing"), (2, False, "forward"), *cases]}


def test_each_reader_waits_for_the_gathers_of_its_own_parameters():
    for rank, found in enumerate(run_ranks(2, all_waits)):
        *_, params = found.pop((1, False, "nothing"))
        assert set(found.pop((2, False, "forward"))[0]) == {-1}, "by default the step waits for all"
        for (stage, _, read), (waits, readers, values) in found.items():
            where = f"{read}, stage {stage}, rank {rank}"
            torch.testing.assert_close(values, params, rtol=0, atol=0, msg=where)
            block = READERS.index("blocks.1")
            expected = {
                "forward": [min(own) for own in readers],
                "a call outside the wrapper": [min(own) for own in readers],
                "a part": [0 if block in own else None for own in readers],
                "nothing": [None for _ in readers],
            }.get(read, [0 for _ in readers])
            if read == "one parameter":
                assert set(waits) == {None, 0}, where
            else:
                assert waits == expected, where


def give_up(_grad: Tensor) -> None:
    raise RuntimeError("on purpose")


def train_and_drop(ranks: Axis | None, stage: int, gives_up: bool) -> list[Tensor]:
    """Return the parameters after one step. The engine is left with messages under way, and freed by the collector."""
    torch.manual_seed(1)
    model = ZeroDataParallel(Model(), ranks, ZeroConfig(stage, bucket_numel=28, overlap_gather=stage < 3))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    with model.gathered() as module:
        params = [param.detach().clone() for param in module.parameters()]
    x = model(torch.arange(5))
    if gives_up:
        model.module.blocks[0][0].weight.register_hook(give_up)
        with pytest.raises(RuntimeError, match="on purpose"):
            x.square().sum().backward()
    else:
        x.square().sum().backward()
        optimizer.step()
    return params


def drop_engines(cases: list[tuple[int, bool]]) -> list[list[Tensor]]:
    data, found = Mesh.create(tensor_size=1).data, []
    for stage, gives_up in cases:
        for ranks in (data, None):
            found.append(train_and_drop(ranks, stage, gives_up))
            gc.collect()
    return found


def test_an_engine_that_is_dropped_with_messages_under_way_leaves_the_group_to_the_next_one():
    cases = [(0, True), (1, False), (2, False), (2, True), (3, True), (3, False)]
    for found in run_ranks(4, drop_engines, cases):
        for params in found:
            torch.testing.assert_close(params, found[0], rtol=1e-5, atol=1e-6)  # fp32
