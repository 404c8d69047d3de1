"""Costs of a start, a save and an evaluation in worlds of different sizes, and how fast they grow with them.

    python -m lab.scale [--processes 4 8 16 32 64] [--ranks 1024 16384]

Up to some tens of ranks are processes of a few lines, with gloo and a TCPStore. In larger worlds two ranks run, the
first one and one that stands for all others, with a store in memory: what that one adds to a count, it adds for all of
them, and where one of the others would have set a key, its own value is found. All ranks run the same code of a run:

    start         join this start | names and facts of nodes | wrapping | first heartbeat
    save          a checkpoint of one number a rank
    evaluation    200 forwards of stage 3 in two seconds

Operations are calls of the store by this project; those by which torch connects its process groups are left out.
"""

import argparse
import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.checkpoint.peer_files import PeerFiles
from gpt.monitor.node_map import find_nodes
from lab.pages.markdown import table
from parallel import stopping, store, world
from parallel.comm_log import CommLog
from parallel.mesh import Axis, Mesh
from parallel.store import Decisions
from parallel.watchdog import Heart
from parallel.world import StartOptions, World, start_world, stop_world
from zero.checkpoint import writer
from zero.checkpoint.writer import CheckpointWriter, Publication
from zero.extensions import host_barrier
from zero.extensions.host_barrier import HostBarrier

OPERATIONS = (*("set", "get", "add", "check", "wait", "append", "delete_key", "compare_set", "multi_get", "multi_set"),)
RANKS_PER_NODE = 8
FACTS = {"facts": "." * 1000}  # as long as those of a node that its ranks compare
NUM_FORWARDS, FORWARD_SECONDS = 200, 0.01
CPU = torch.device("cpu")
Costs = dict[str, float]  # by name


@dataclass
class Counts:
    """The operations of a rank, and the bytes that the store has replied, in each phase."""

    phase: str = ""
    operations: Counter[str] = field(default_factory=Counter)
    reply_bytes: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = ""

    def note(self, reply: object) -> None:
        values = reply if isinstance(reply, list) else [reply]
        self.operations[self.phase] += 1
        self.reply_bytes[self.phase] += sum(len(value) for value in values if isinstance(value, bytes))


def counted(method: Callable[..., Any], counts_of: Callable[[Any], Counts]) -> Callable[..., Any]:
    """Return a method of a store that notes its calls."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = method(self, *args, **kwargs)
        counts_of(self).note(reply)
        return reply

    return call


class Values:
    """The values in the store in memory of a world of `size` ranks."""

    def __init__(self, size: int):
        self.size, self.changed = size, threading.Condition()
        self.values: dict[str, bytes] = {}
        self.of_others: set[str] = set()  # keys that the rank has set which stands for all but the first one


class RankStore:
    """The store in memory, as the first rank (0) sees it, or the one that stands for all others (1)."""

    def __init__(self, shared: Values, rank: int, counts: Counts):
        self._shared, self._values, self._rank, self.counts = shared, shared.values, rank, counts

    def _times(self, key: str) -> int:
        """Return how many ranks do what this one does; a key that ends with its number is its own."""
        return 1 if self._rank == 0 or key.endswith("/1") else self._shared.size - 1

    def _found(self, key: str) -> str:
        """Return the key, or the one whose value another rank would have set under this key."""
        stem, _, last = key.rpartition("/")
        is_of_other = key not in self._values and last.isdigit() and 1 < int(last) < self._shared.size
        return f"{stem}/1" if is_of_other and f"{stem}/1" in self._shared.of_others else key

    def _put(self, key: str, value: str | bytes) -> None:
        with self._shared.changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            if self._rank:
                self._shared.of_others.add(key)
            self._shared.changed.notify_all()

    def set(self, key: str, value: str) -> None:
        self._put(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def append(self, key: str, value: str) -> None:
        with self._shared.changed:
            self._put(key, self._values.get(key, b"") + value.encode() * self._times(key))

    def add(self, key: str, number: int) -> int:
        with self._shared.changed:
            total = int(self._values.get(key, b"0")) + number * self._times(key)
            self._put(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._shared.changed:
            if self._values.get(key, b"") == expected.encode():
                self._put(key, desired)
            return self._values[key]

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(self._found(key) in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(0)) -> None:
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: all(self._found(key) in self._values for key in keys))

    def get(self, key: str) -> bytes:
        return self._values[self._found(key)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._values[self._found(key)] for key in keys]


for _name in OPERATIONS:
    setattr(RankStore, _name, counted(getattr(RankStore, _name), lambda own: own.counts))


@dataclass
class OneNumber:
    """A state that a writer saves."""

    mesh: Mesh
    device: torch.device = CPU

    def tensors(self) -> dict[str, Tensor]:
        return {"number": torch.ones(1)}

    def describe(self, content: dict[str, Any]) -> dict[str, Any]:
        return content


def live(own: World, data: Axis, folder: Path, counts: Counts) -> None:
    """Run what a rank does in the store from its start to a save."""
    log, shared = data.log, store.shared_store()
    with counts.during("start"):
        find_nodes(own)
        Decisions(own.rank, own.size, "facts").decide(FACTS if own.local_rank == 0 else None, lambda found: [])
        barrier = HostBarrier(data)
        barrier.wait("wraps a module")
        Heart(shared, own.rank, log, time.monotonic).write()
    with counts.during("save"):
        saver = CheckpointWriter(OneNumber(Mesh(data, Axis.trivial("tensor"), log)), Publication(""), is_async=False)  # type: ignore[arg-type]
        saver.begin(folder / "step-00000001", {}, "save", "of step 1")
        saver.wait()
    with counts.during("evaluation"):
        for number in range(NUM_FORWARDS):
            barrier.tell(number, "begins a forward")
            time.sleep(FORWARD_SECONDS)


def in_memory(size: int) -> Costs:
    """Return the costs of a world of `size` ranks, of which two run."""
    shared, counts, here = Values(size), (Counts(), Counts()), threading.local()
    log = CommLog()

    def run(rank: int, folder: Path) -> None:
        here.rank, here.store = rank, RankStore(shared, rank, counts[rank])
        with counts[rank].during("start"):
            world._store_of_this_start(here.store, rank, size, 600.0)
        group: Any = SimpleNamespace(group_name="data")
        local_rank = rank % RANKS_PER_NODE
        live(
            World(rank, size, local_rank, RANKS_PER_NODE, CPU),
            Axis("data", size, rank, log, group),
            folder,
            counts[rank],
        )

    with ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        for module in (store, writer, host_barrier):
            patches.enter_context(mock.patch.object(module, "shared_store", partial(getattr, here, "store")))
        limit = mock.Mock(return_value=timedelta(seconds=600))
        patches.enter_context(mock.patch.object(host_barrier, "time_limit", limit))
        patches.enter_context(mock.patch.object(Axis, "has_peers", True))
        for name, replaced in {
            "get_rank": lambda *_: here.rank,
            "get_global_rank": lambda *_: 0,
            "PrefixStore": lambda _, inner: inner,
        }.items():
            patches.enter_context(mock.patch.object(dist, name, replaced))
        threads = [threading.Thread(target=run, args=(rank, Path(folder))) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return costs_of(counts[0], counts[1], size)


def run_process(rank: int, size: int, port: int, folder: Path, results: Any) -> None:
    """Run a rank in a process of its own, and put (rank, its counts, its connections) into `results`."""
    local = {"LOCAL_RANK": rank % RANKS_PER_NODE, "LOCAL_WORLD_SIZE": min(size, RANKS_PER_NODE)}
    numbers = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "OMP_NUM_THREADS": 1, **local}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    counts = Counts()
    for name in OPERATIONS:
        setattr(dist.Store, name, counted(getattr(dist.Store, name), lambda _: counts))
    with counts.during("start"):
        own = start_world(StartOptions("cpu"))
    data = Mesh.create(tensor_size=1).data
    live(own, data, folder, counts)
    to_store, before = num_sockets(port), num_sockets()
    peers = PeerFiles(folder, rank, "127.0.0.1", "0" * 32)
    with peers.connected((rank + RANKS_PER_NODE) % size) as partner:
        (sent := folder / f"{rank}").write_text("file")
        partner.put(sent, f"copy-{rank}")
        dist.barrier()  # all have connected to their partners
        of_snapshots = num_sockets() - before
        dist.barrier()
    results.put((rank, counts, to_store, of_snapshots))
    peers.close()
    stop_world()


def num_sockets(port: int | None = None) -> int:
    """Return the number of sockets of this process, or of those that are connected to a port."""
    names = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)]
    own = {name.removeprefix("socket:[").rstrip("]") for name in names if name.startswith("socket:")}
    if port is None:
        return len(own)
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    # A set: the list may have a line twice if it changes while it is read.
    return len(own & {words[9] for words in lines if words[2].endswith(f":{port:04X}")})


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def in_processes(size: int) -> Costs:
    """Return the costs of a world of `size` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_process, args=(rank, size, port, Path(folder), results)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found = sorted((results.get() for _ in ranks), key=lambda result: result[0])
        for process in ranks:
            process.join()
    _, counts, to_store, of_snapshots = zip(*found, strict=True)
    most = max(counts[1:], key=lambda of_rank: of_rank.operations["start"])
    sockets = {"connections to the store, a rank": max(to_store), "sockets of snapshots, a rank": max(of_snapshots)}
    return sockets | costs_of(counts[0], most, size)


def costs_of(first: Counts, other: Counts, size: int) -> Costs:
    """Return the costs of which all worlds have a number."""
    found: Costs = {}
    for phase in ("start", "save", "evaluation"):
        found[f"operations, {phase}, first rank"] = first.operations[phase]
        found[f"operations, {phase}, another rank"] = other.operations[phase]
    for phase in ("start", "save"):
        found[f"bytes of replies, {phase}, first rank"] = first.reply_bytes[phase]
        found[f"bytes of replies, {phase}, another rank"] = other.reply_bytes[phase]
    return found | {"polls for a stop, all ranks, a second": size / stopping.poll_seconds(size)}


def exponent(costs: dict[int, float]) -> str:
    """Return the power of the size with which a cost grows from the smallest to the largest world that has it."""
    first, last = min(costs), max(costs)
    if first == last or not costs[first] or not costs[last]:
        return "-"
    return f"{math.log(costs[last] / costs[first]) / math.log(last / first):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser("python -m lab.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[4, 8, 16, 32, 64], help="sizes of real worlds")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 16384], help="sizes of worlds in memory")
    options = parser.parse_args()
    real = {size: in_processes(size) for size in options.processes}
    large = {size: in_memory(size) for size in options.ranks}
    rows = []
    for name in dict.fromkeys(name for costs in (real | large).values() for name in costs):
        of_sizes = [{size: costs[name] for size, costs in worlds.items() if name in costs} for worlds in (real, large)]
        cells = [f"{costs[name]:,.0f}" if name in costs else "" for costs in (real | large).values()]
        rows.append([name, *cells, *(exponent(costs) if costs else "-" for costs in of_sizes)])
    headings = ["", *map(str, real | large), "exponent, processes", "exponent, in memory"]
    print("\n".join(table(headings, rows)))


if __name__ == "__main__":
    main()
