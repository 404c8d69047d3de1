"""What must be alike on all nodes before a job starts, and what must work on each: found out here, compared there."""

import hashlib
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from parallel.errors import ConfigError

ROOT = Path(__file__).parents[2]
MAX_CLOCK_SECONDS = 2.0
PROBE_BYTES = 32 * 2**20
MIN_FREE_BYTES = 2**30
MIN_DISK_BYTES_PER_SECOND, MIN_SHARE_OF_FASTEST = 5e6, 0.2


@dataclass(frozen=True)
class NodeFacts:
    """Of one node. Files are known by the digests of their contents; "missing" where there is none."""

    name: str
    address: str
    code: dict[str, str]
    versions: str
    arguments: list[str]
    data: dict[str, str]
    num_devices: int
    disk: str
    free_bytes: int
    disk_bytes_per_second: float
    disk_error: str = ""
    clock_seconds: float = 0.0  # ahead of the first node's

    def is_called(self, name: str) -> bool:
        return name in (self.name, self.name.split(".")[0], self.address)


def find_out(arguments: Sequence[str], address: str = "") -> NodeFacts:
    """Of this node, for a training that is to be started with `arguments`. Writes 32 MiB where run.dir will be."""
    settings = dict(_settings(arguments))
    disk = _existing(Path(settings.get("run.dir", "runs/default")))
    error, rate = "", 0.0
    try:
        rate = _write_rate(disk)
    except OSError as problem:
        error = problem.strerror or str(problem)
    return NodeFacts(
        name=socket.gethostname(),
        address=address,
        code={str(path.relative_to(ROOT)): _digest(path) for path in _source_files()},
        versions=f"Python {platform.python_version()}, torch {torch.__version__}",
        arguments=[f"{name}={value}" for name, value in sorted(settings.items())],
        data={str(path): _digest(path) for path in _data_files(settings.get("data.path", []))},
        num_devices=torch.cuda.device_count(),
        disk=str(disk),
        free_bytes=shutil.disk_usage(disk).free,
        disk_bytes_per_second=rate,
        disk_error=error,
    )


def find_problems(nodes: Sequence[NodeFacts]) -> list[str]:
    """In words, each with the node's name. What most nodes have is right; in a tie, what the first one has."""
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
    problems += _other_files(nodes, "code", [node.code for node in nodes])
    problems += _other_files(nodes, "data", [node.data for node in nodes])
    usual_arguments = set(_usual([tuple(node.arguments) for node in nodes]))
    for node in nodes:
        if other := sorted(set(node.arguments) ^ usual_arguments):
            problems.append(f"{node.name}: other settings than elsewhere: {', '.join(other[:4])}")
        if abs(node.clock_seconds) > MAX_CLOCK_SECONDS:
            problems.append(f"{node.name}: its clock differs from {nodes[0].name}'s by {node.clock_seconds:+.1f} s")
    return problems + _disk_problems(nodes)


def _disk_problems(nodes: Sequence[NodeFacts]) -> list[str]:
    problems = []
    fastest = max(node.disk_bytes_per_second for node in nodes)
    for node in nodes:
        rate = node.disk_bytes_per_second
        if node.disk_error:
            problems.append(f"{node.name}: {node.disk} cannot be written: {node.disk_error}")
        elif node.free_bytes < MIN_FREE_BYTES:
            problems.append(f"{node.name}: {node.disk} is nearly full: {node.free_bytes / 1e9:.2f} GB are free")
        elif rate < MIN_DISK_BYTES_PER_SECOND or rate < MIN_SHARE_OF_FASTEST * fastest:
            problems.append(
                f"{node.name}: {node.disk} is slow: {rate / 1e6:.1f} MB/s, the fastest node has {fastest / 1e6:.1f}"
            )
    return problems


def _other_files(nodes: Sequence[NodeFacts], what: str, files: Sequence[dict[str, str]]) -> list[str]:
    problems = []
    paths = sorted(set().union(*files))
    usual = {path: _usual([found.get(path, "missing") for found in files]) for path in paths}
    for node, found in zip(nodes, files, strict=True):
        if other := [path for path in paths if found.get(path, "missing") != usual[path]]:
            more = f" and {len(other) - 4} more" if len(other) > 4 else ""
            problems.append(f"{node.name}: other {what} than elsewhere: {', '.join(other[:4])}{more}")
        if absent := [path for path in paths if found.get(path) == usual[path] == "missing"]:
            problems.append(f"{node.name}: no {what}: {', '.join(absent)}")
    return problems


def _usual(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]  # of equally common ones, the first that came


def _settings(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of the options, and of the YAML files that --config names, in their order. ConfigError."""
    words = iter(arguments)
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            value = value if has_value else next(words, "")
            yield from _of_file(Path(value)) if name == "config" else [(name, value)]


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from _flat(yaml.safe_load(path.read_text()) or {})
    except (OSError, yaml.YAMLError) as error:
        node = socket.gethostname()
        raise ConfigError(f"{node}: config {path} cannot be read: {' '.join(str(error).split())}") from error


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _data_files(value: Any) -> Iterator[Path]:
    """The indices of the PREFIX, or of the WEIGHT:PREFIX entries: what they say, the .bin files must hold."""
    entries = yaml.safe_load(value) if isinstance(value, str) and value.startswith("[") else value
    for entry in [entries] if isinstance(entries, str) else entries:
        yield Path(str(entry).rpartition(":")[2] + ".idx")


def _source_files() -> Iterator[Path]:
    for package in ("parallel", "zero", "gpt", "data"):
        yield from sorted((ROOT / package).rglob("*.py"))
    yield ROOT / "pretrain_gpt.py"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "missing"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)


def _write_rate(folder: Path) -> float:
    """Bytes a second onto the disk. Raises OSError."""
    probe = folder / f".preflight-{socket.gethostname()}-{os.getpid()}"
    block = os.urandom(2**20)
    start = time.perf_counter()
    try:
        with probe.open("wb") as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    return PROBE_BYTES / (time.perf_counter() - start)
