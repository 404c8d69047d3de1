"""Facts of a node that are checked before a job starts: what all nodes must agree on, and what must work on each."""

import hashlib
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from parallel.process_defaults import max_open_files

ROOT = Path(__file__).parents[2]
MAX_CLOCK_SECONDS = 2.0  # difference from the first node's clock
PROBE_BYTES, NUM_PROBES = 8 * 2**20, 4  # written to measure a disk, so many times
MIN_FREE_BYTES = 2**30
CONNECTIONS_PER_RANK, FILES_PER_FILE, OTHER_FILES = 3, 2, 100  # to the store; per file of a job, whose data has two
MIN_DISK_BYTES_PER_SECOND, MIN_SHARE_OF_FASTEST = 5e6, 0.2  # a disk below either is slow
MOST_BYTES_PER_SECOND = 200e6  # that a disk is compared with: those of busy nodes differ much, and are fast enough


@dataclass(frozen=True)
class Job:
    """The settings and files of a program on which all nodes must agree before it starts.

    `settings` are lines NAME=VALUE, or the program's arguments unchanged. Every node reads `files`, whose contents must
    be the same, and writes to `folder`, which need not exist yet.
    """

    settings: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    folder: Path = Path()
    num_ranks: int = 1


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node. `code` and `data` map a file to a digest of its contents, or to "missing"."""

    name: str
    address: str
    code: dict[str, str]
    versions: str
    settings: list[str]
    data: dict[str, str]
    num_devices: int
    disk: str
    free_bytes: int
    disk_bytes_per_second: float
    disk_error: str = ""
    clock_seconds: float = 0.0  # ahead of the first node's clock
    max_files: int = 2**20  # that a process may open, and that the store, or a rank, will
    num_files: int = 0

    def has_name(self, name: str) -> bool:
        return name in (self.name, self.name.split(".")[0], self.address)


def find_facts(job: Job, address: str = "") -> NodeFacts:
    """Return the facts of this node for a job. Writes 32 MiB to the disk of the job's folder, and deletes them."""
    disk = _nearest_existing(job.folder)
    error, rate = "", 0.0
    try:
        rate = _write_rate(disk)
    except OSError as problem:
        error = problem.strerror or str(problem)
    return NodeFacts(
        name=socket.gethostname(),
        address=address,
        code={str(path.relative_to(ROOT)): _digest(path) for path in _source_files()},
        versions=f"Python {platform.python_version()}, torch {torch.__version__}{_compilers()}",
        settings=sorted(job.settings),
        data={str(path): _digest(path) for path in job.files},
        num_devices=torch.cuda.device_count(),
        disk=str(disk),
        free_bytes=shutil.disk_usage(disk).free,
        disk_bytes_per_second=rate,
        disk_error=error,
        max_files=max_open_files(),
        num_files=OTHER_FILES + max(CONNECTIONS_PER_RANK * job.num_ranks, FILES_PER_FILE * len(job.files)),
    )


def _compilers() -> str:
    """Return what torch.compile needs on a GPU, as far as it is installed."""
    if not torch.cuda.is_available():
        return ""
    compiler = "a C compiler" if shutil.which("cc") or shutil.which("gcc") else "no C compiler"
    return f", {'Triton' if find_spec('triton') else 'no Triton'} and {compiler}"


def seconds_ahead(there: float, asked: float, answered: float) -> float:
    """Return by how much another node's clock, which was read for a reply, is ahead; 0 if the reply took longer."""
    ahead = there - (asked + answered) / 2
    return ahead if abs(ahead) > answered - asked else 0.0


def find_problems(nodes: Sequence[NodeFacts]) -> list[str]:
    """Return a line for each problem, with the name of its node.

    A node has a problem if it differs from the most common value; of equally common ones the first node's counts.
    """
    problems = []
    for what, values in (
        ("versions", [node.versions for node in nodes]),
        ("number of GPUs", [str(node.num_devices) for node in nodes]),
    ):
        usual = _usual(values)
        problems += [
            f"{node.name}: {what}: {value}, elsewhere {usual}"
            for node, value in zip(nodes, values, strict=True)
            if value != usual
        ]
    problems += _file_problems(nodes, "code", [node.code for node in nodes])
    problems += _file_problems(nodes, "data", [node.data for node in nodes])
    usual_settings = set(_usual([tuple(node.settings) for node in nodes]))
    for node in nodes:
        if other := sorted(set(node.settings) ^ usual_settings):
            problems.append(f"{node.name}: other settings than elsewhere: {', '.join(other[:4])}")
        if abs(node.clock_seconds) > MAX_CLOCK_SECONDS:
            problems.append(f"{node.name}: its clock differs from {nodes[0].name}'s by {node.clock_seconds:+.1f} s")
        if node.max_files < node.num_files:
            problems.append(
                f"{node.name}: a process may open {node.max_files} files, {node.num_files} are needed, for the store's "
                f"{CONNECTIONS_PER_RANK} connections of each rank or for the data; raise the hard limit (ulimit -Hn)"
            )
    return problems + _disk_problems(nodes)


def _disk_problems(nodes: Sequence[NodeFacts]) -> list[str]:
    problems = []
    fastest = max(node.disk_bytes_per_second for node in nodes)
    least = max(MIN_DISK_BYTES_PER_SECOND, MIN_SHARE_OF_FASTEST * min(fastest, MOST_BYTES_PER_SECOND))
    for node in nodes:
        rate = node.disk_bytes_per_second
        if node.disk_error:
            problems.append(f"{node.name}: {node.disk} cannot be written: {node.disk_error}")
        elif node.free_bytes < MIN_FREE_BYTES:
            problems.append(f"{node.name}: {node.disk} is nearly full: {node.free_bytes / 1e9:.2f} GB are free")
        elif rate < least:
            problems.append(
                f"{node.name}: {node.disk} is slow: {rate / 1e6:.1f} MB/s, the fastest node has {fastest / 1e6:.1f}"
            )
    return problems


def _file_problems(nodes: Sequence[NodeFacts], what: str, files: Sequence[dict[str, str]]) -> list[str]:
    problems = []
    paths = sorted(set().union(*files))
    usual = {path: _usual([found.get(path, "missing") for found in files]) for path in paths}
    for node, found in zip(nodes, files, strict=True):
        if other := [path for path in paths if found.get(path, "missing") != usual[path]]:
            more = f" and {len(other) - 4} more" if len(other) > 4 else ""
            problems.append(f"{node.name}: other {what} than elsewhere: {', '.join(other[:4])}{more}")
        if absent := [path for path in paths if found.get(path) == usual[path] == "missing"]:
            problems.append(f"{node.name}: missing {what}: {', '.join(absent)}")
    return problems


def _usual(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]  # of equally common ones the first


def _source_files() -> Iterator[Path]:
    for package in ("parallel", "zero", "gpt", "data"):
        yield from sorted((ROOT / package).rglob("*.py"))
    yield ROOT / "pretrain_gpt.py"


def _digest(path: Path) -> str:
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _write_rate(folder: Path) -> float:
    """Return the bytes per second at which a file in the folder can be written to disk. Raises OSError.

    Of several parts the fastest counts, because the other programs of a busy node may delay the rest.
    """
    probe = folder / f".preflight-{uuid4().hex}"
    block, seconds = os.urandom(2**20), []
    try:
        with probe.open("xb") as file:
            for _ in range(NUM_PROBES):
                start = time.perf_counter()
                for _ in range(PROBE_BYTES // len(block)):
                    file.write(block)
                # First Python's buffer is written to the system, then the system's to the disk, then the clock is read.
                file.flush()
                os.fsync(file.fileno())
                seconds.append(time.perf_counter() - start)
    finally:
        probe.unlink(missing_ok=True)
    return PROBE_BYTES / min(seconds)
