"""Measurements in rounds: each has one of every contender, so that other work on the machine affects all of them alike.

Contenders are compared by the ratios of what was measured in the same round.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lab.measure.bandwidth import synchronize

Measured = TypeVar("Measured")


class Quartiles(NamedTuple):
    low: float
    median: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} (quartiles {self.low:{form}} to {self.high:{form}})"


def in_rounds(contenders: Mapping[str, Callable[[], Measured]], num_rounds: int) -> dict[str, list[Measured]]:
    """Return what each contender has measured in each round. The order rotates from round to round."""
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(contenders[name]())
    return found


def timed(action: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds of an action on the slowest rank, and its processor time on this one."""
    synchronize(device)
    start, cpu_start = time.perf_counter(), time.process_time()
    action()
    synchronize(device)
    cpu_seconds = time.process_time() - cpu_start
    seconds = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), cpu_seconds


def bytes_sent(interface: str) -> int:
    """Return the bytes that this machine, or network namespace, has sent by an interface, other programs included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines)}[interface]


def process_memory(name: str) -> int:
    """Return the bytes of a field of /proc/self/status: VmRSS is the resident memory, VmHWM its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, baseline, strict=True)]


def quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))
