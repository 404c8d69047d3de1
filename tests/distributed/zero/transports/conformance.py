"""Runs by which a transport is compared with one process: test_conformance.py has a row for each, with its messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from lab.observe.memory_tracker import MemoryTracker
from parallel.memory_kinds import TensorKind
from parallel.mesh import Axis, Mesh, Work
from tests.pairwise import noting
from zero.checkpoint.resident import buffer_bytes
from zero.core.protocols.home import Home, Homes
from zero.core.protocols.transport import Transport, TransportOf
from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer
from zero.settings.config import ZeroConfig

WIDTH, NUM_BLOCKS, NUM_STEPS, CLIP_NORM = 24, 2, 2, 0.5
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
VARIANTS = [{}, {"overlap": False}, {"accumulate": "local"}, {"overlap_gather": True, "defragment": True}]  # in turns
Description = Callable[[Axis], Transport | TransportOf]  # of the data axis, perhaps with parts


@dataclass(frozen=True)
class Row:
    """A transport, and what it sends of a bucket: (operation, axis, elements for each element of the bucket)."""

    describe: Description
    num_ranks: int
    stages: Sequence[int]
    messages: Mapping[str, list[tuple[str, str, float]]]
    """Of "reduce" in a micro-batch, of the "last" of a step, of "publish", "gather" and a "lossy" gather."""
    shard_size: int | None = None
    has_kinds: bool = False
    """True if ranks at different places of a group have other values of some parameters."""
    can_keep: bool = True
    """False if gradients that the stage need not keep in full cannot be kept."""
    is_lossy: bool = False
    """True if gradients or parameters are rounded, so that only the first loss and norm are those of one process."""
    home: Callable[[torch.device], Home] = Home
    """Of all states that can be apart from the accelerator."""

    def kind_of(self, rank: int) -> int:
        """Return the number of the values that a rank has of parameters of several kinds."""
        return rank % self.shard_size if self.has_kinds and self.shard_size else 0


class Block(nn.Module):
    """A block with a gate, which a forward may leave out, and a layer of which there may be several kinds."""

    def __init__(self, num_kinds: int):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kinds = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_kinds))

    def forward(self, x: Tensor, *, gates: bool, kind: int) -> Tensor:
        h = torch.tanh(self.kinds[kind](self.up(x)))
        return x + (h * self.gate(x) if gates else h)


class Blocks(nn.Module):
    def __init__(self, num_kinds: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block(num_kinds) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, gates: bool, kind: int = 0, *, breaks: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale, gates=gates, kind=kind)
            if breaks:
                x.register_hook(_fail)
        return x.square().mean()


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    num_skipped: int = 1


def batch_of(step: int, micro_batch: int, rank: int, row: Row, num_micro_batches: int) -> tuple[Tensor, bool]:
    """Return a rank's inputs, and whether it uses gates: the last rank has fewer rows and no gates at the end."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    is_uneven = rank == row.num_ranks - 1 and micro_batch == num_micro_batches - 1
    return torch.randn(3 - is_uneven, WIDTH, generator=generator, dtype=torch.float64), not is_uneven


def whole_model(num_kinds: int) -> Blocks:
    torch.manual_seed(0)
    return Blocks(num_kinds).double()


@cache
def in_one_process(num_ranks: int, num_kinds: int, num_micro_batches: int) -> Trained:
    """Train a model that has all kinds on the batches of all ranks."""
    row = Row(Axis.without_peers, num_ranks, (), {}, num_kinds, has_kinds=True)
    model = whole_model(num_kinds)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        losses.append(0.0)
        for micro_batch in range(num_micro_batches):
            for rank in range(num_ranks):
                x, gates = batch_of(step, micro_batch, rank, row, num_micro_batches)
                loss = model(x, gates, row.kind_of(rank)) / (num_micro_batches * num_ranks)
                loss.backward()
                losses[-1] += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: param.detach() for name, param in model.named_parameters()})


def wrapped(
    row: Row, stage: int, data: Axis, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[ZeroDataParallel, ZeroOptimizer]:
    """Return this rank's model, with its kind of the layer that has several, and its optimizer."""
    model = whole_model(row.shard_size if row.has_kinds and row.shard_size else 1).to(dtype)
    for block in model.blocks:
        block.kinds = nn.ModuleList([block.kinds[row.kind_of(data.rank)]])
    described = row.describe(data)
    if isinstance(described, Transport):
        settings["sum_over_ranks"] = "leaves" if described.is_rank_invariant else "message"
        if described.in_fp32:  # of messages in half precision, in stages 0 and 1 too
            settings |= {"sum_over_ranks": "fp32", "reduce_dtype": "bf16"}
    config = ZeroConfig(stage, **{"bucket_numel": 800} | settings)
    home = row.home(torch.device("cpu"))
    homes = Homes(Home(home.accelerator), home, home) if home.is_apart else None
    engine = ZeroDataParallel(model, data, config, transport=described, homes=homes)
    return engine, ZeroOptimizer(
        engine, torch.optim.AdamW, clip_norm=CLIP_NORM, warn_skipped=False, fused=True, **SETTINGS
    )


def run_steps(
    model: ZeroDataParallel, optimizer: ZeroOptimizer, row: Row, num_micro_batches: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train; yield (loss of this rank, norm) of each step. A backward breaks off before each; one step is skipped."""
    rank, divisor = model.data.rank, 1 if model.is_rank_invariant else num_micro_batches
    dtype = next(model.parameters()).dtype
    for step in range(NUM_STEPS):
        with model.accumulate():
            x = batch_of(step, 0, rank, row, num_micro_batches)[0].to(dtype)
            model(x, True).backward()
        with suppress(KeyError):
            model(x, True, breaks=True).backward()
        optimizer.zero_grad()
        for is_refused in (True, False) if step == 1 else (False,):
            total = torch.zeros((), dtype=torch.float64)
            for micro_batch in range(num_micro_batches):
                x, gates = batch_of(step, micro_batch, rank, row, num_micro_batches)
                with model.accumulate() if micro_batch < num_micro_batches - 1 else nullcontext():
                    loss = model(x.to(dtype), gates)
                    loss = loss * torch.inf if is_refused and rank == row.num_ranks - 1 else loss
                    (loss / divisor).backward()
                total += loss.detach() / num_micro_batches
            norm = optimizer.step()
        for bucket in optimizer.buckets if model.homes.optimizer.is_apart else ():
            optimizer.place(bucket, bucket.home)  # with moments, which are made in the first step
        yield total, norm


def train(row: Row, data: Axis, apart: Axis, case: tuple[int, int], settings: Mapping[str, Any]) -> Trained:
    """Train on real ranks, whose losses are added along an axis of their own."""
    stage, num_micro_batches = case
    model, optimizer = wrapped(row, stage, data, **settings)
    losses, norms = [], []
    for loss, norm in run_steps(model, optimizer, row, num_micro_batches):
        apart.all_reduce(loss, out=loss).wait()
        losses.append(loss.item() / row.num_ranks)
        norms.append(norm.item())
    with model.gathered() as module:
        params = {name: param.detach().clone() for name, param in module.named_parameters()}
    return Trained(losses, norms, params, int(optimizer.num_skipped))


def train_all(row: Row, cases: Sequence[tuple[int, int]]) -> list[Trained]:
    """Train in all (stage, number of micro-batches), while settings take turns."""
    data = Mesh.create(tensor_size=1, shard_size=row.shard_size).data
    apart = Mesh.create(tensor_size=1).data  # its messages order nothing that the transport sends
    found, variants = [], cycle(each for each in VARIANTS if row.can_keep or "accumulate" not in each)
    for case, settings in zip(cases, variants, strict=False):
        with noting((case, settings)):
            found.append(train(row, data, apart, case, settings))
    return found


def examined(row: Row) -> tuple[dict[str, list[tuple[str, str, float]]], int]:
    """Return what each method of a bucket's transport sends, and the bytes of buffers left by the last backward.

    In stage 3 a backward frees them, but those of states that are stored on the host and sent.
    """
    mesh = Mesh.create(tensor_size=1, shard_size=row.shard_size)
    with MemoryTracker(torch.device("cpu")) as tracker:
        model, optimizer = wrapped(row, row.stages[-1], mesh.data)
        for _ in range(2):
            optimizer.step()
            x, gates = batch_of(0, 0, mesh.data.rank, row, 1)
            model(x, gates).backward()
        left = tracker.device.resident[TensorKind.BUFFERS] - buffer_bytes(model, optimizer).get(
            "shards for the host", 0
        )
    optimizer.step()
    bucket = max(model.buckets, key=lambda bucket: len(bucket.ranges.elements))
    transport, elements = bucket.transport, len(bucket.ranges.elements)
    message, full = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements)
    rest, total = bucket.ranges.of_bucket(full, bucket.ranges.rest), bucket.grads.total
    calls: dict[str, Callable[[], Work]] = {"gather": partial(transport.gather, rest, full)}
    if transport.is_lossy:
        calls["lossy"] = partial(transport.gather, rest, full, transport.room(full))
    if len(bucket.ranges.own) < len(bucket.ranges.rest):
        calls["publish"] = partial(transport.publish, bucket.ranges.own_of(rest), rest)
    if row.stages[-1] > 1:  # else gradients are reduced once a step
        calls["reduce"] = partial(transport.reduce, message, total, is_last=False)
    calls["last"] = partial(transport.reduce, message, total, is_last=True)
    found = {}
    mesh.log.keeps_events = True
    for name, call in calls.items():
        transport.begin_backward(1, 1)
        before = len(mesh.log.events)
        call().wait()
        found[name] = []
        for event in mesh.log.events[before:]:
            # Of an all-to-all the log has what all ranks send.
            num_bytes = event.message_bytes / (event.group_size if event.op == "all_to_all" else 1)
            found[name].append((event.op, event.axis, num_bytes / event.dtype.itemsize / elements))
    return {name: sent for name, sent in found.items() if sent}, left


@dataclass(frozen=True)
class HastyAxis(Axis):
    """An axis whose messages of one operation are not waited for, unless they are single numbers."""

    hasty_op: str = ""

    def _launch(self, event: Any, launch: Any, read: Tensor, out: Tensor) -> Work:
        work = super()._launch(event, launch, read, out)
        return Work() if event.op == self.hasty_op and out.numel() > 1 else work


def hasty(axis: Axis, op: str, name: str) -> Axis:
    """Return the axis, or the axis whose part has this name, that does not wait for an operation along that."""
    if axis.parts:
        inner, outer = (hasty(part, op, name) for part in axis.parts)
        axis = replace(axis, parts=(inner, outer))
    if axis.name != name:
        return axis
    return HastyAxis(**{each.name: getattr(axis, each.name) for each in fields(Axis)}, hasty_op=op)


def train_imitated(row: Row, stage: int, num_micro_batches: int, without: tuple[str, str] | None = None) -> None:
    """Train one rank of an imitated world over NCCL; without the waits for (operation, axis), if given."""
    data = Mesh.create(tensor_size=1, shard_size=row.shard_size, imitated_backend="nccl").data
    describe = row.describe
    chosen = row if without is None else replace(row, describe=lambda axis: describe(hasty(axis, *without)))
    model, optimizer = wrapped(chosen, stage, data, torch.bfloat16)
    for _ in run_steps(model, optimizer, row, num_micro_batches):
        pass


def _fail(_grad: Tensor) -> None:
    raise KeyError
