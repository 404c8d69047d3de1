"""The files config.yaml and metrics.jsonl in the folder of a run. Those of an earlier run are renamed, not overwritten.

metrics.jsonl has one JSON object per logged step; a rank that runs out of memory adds one with `out_of_memory`.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from parallel.validation.errors import ConfigError
from parallel.validation.fields import LARGEST_INT
from parallel.validation.files import read_note
from parallel.validation.paths import remove, unlink_link

logger = logging.getLogger(__name__)

CONFIG, METRICS, LOSS_PLOT, CHECKPOINTS = "config.yaml", "metrics.jsonl", "loss.png", "checkpoints"
WEIGHTS = "weights"
NAME = "run_name"  # the random name of the run, which is in all of its checkpoints
NUMBERS_OF_A_STEP = {  # those that tables and plots read
    "loss",
    "tokens",
    "tokens_per_second",
    "model_tflops_per_device",
    "peak_allocated_bytes",
    "data_axis_bytes",
    "tensor_axis_bytes",
    "skipped_steps",
}
HANG, OUT_OF_MEMORY = "hang", "out_of_memory"  # folders of one file a rank, written only if it happens


def start_run(folder: Path, config: str, last_step: int, name: str = "") -> None:
    """Prepare the folder for the run `name` that continues after `last_step`, or begins if that is 0.

    Metrics after `last_step` are removed, because these steps are run again. If the run begins, old metrics are renamed
    instead. A config.yaml with other settings is renamed too. Raises ConfigError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config_file, metrics = folder / CONFIG, folder / METRICS
        if config_file.exists() and config_file.read_bytes() != config.encode():
            config_file.rename(first_free(config_file.with_suffix(".{}.yaml")))
        unlink_link(config_file)
        config_file.write_bytes(config.encode())
        if name != read_name(folder):
            _replace(folder / NAME, name.encode())
        if metrics.exists() and last_step == 0:
            metrics.rename(first_free(metrics.with_suffix(".{}.jsonl")))
        else:
            cut_metrics(folder, last_step)
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written ({error.strerror}); choose another folder") from error


def read_name(folder: Path) -> str:
    """Return the random name of the run of a folder, "" if an earlier version has begun it."""
    return read_note(folder / NAME)


def cut_metrics(folder: Path, last_step: int) -> None:
    """Remove what was logged after `last_step`, because these steps are run again, and lines that cannot be read.

    Raises ConfigError if a write fails.
    """
    metrics = folder / METRICS
    if not metrics.exists():
        return
    if metrics.is_symlink():  # such as of a folder that was copied as links: the file of the other run stays as it is
        _replace(metrics, metrics.read_bytes())
    lines = list(_complete_lines(metrics))
    damaged = [number for number, (_, record) in enumerate(lines, 1) if record is None]
    kept = b"".join(line for line, record in lines if record and record["step"] <= last_step)
    try:
        # Steps are in order, so what is removed is at the end; this needs no room on the disk.
        if not damaged and metrics.read_bytes().startswith(kept):
            os.truncate(metrics, len(kept))
            return
        # A new file replaces the old one when it is complete, so that a crash cannot lose the metrics.
        original = first_free(metrics.with_suffix(".{}.jsonl"))
        shutil.copyfile(metrics, original)  # not renamed, so that the old file stays until the new one replaces it
        _replace(metrics, kept)
    except OSError as error:
        raise ConfigError(
            f"{metrics} cannot be written ({error.strerror}); make room, or choose another run.dir"
        ) from error
    what = f"steps after {last_step} are among earlier ones"
    if damaged:
        what = f"{len(damaged)} of {len(lines)} lines cannot be read, among them number {damaged[0]}"
    logger.warning("%s: %s; they are removed, and the old file is kept as %s", metrics, what, original.name)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    remove(partial)
    partial.write_bytes(content)
    partial.replace(path)


class MetricsFile:
    """The writer of metrics.jsonl.

    If the disk is full, training goes on, because its checkpoints are worth more than a record of it. What could not be
    written is kept in memory, and written with a later record: sinks and comparisons rely on a complete file.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._waiting: list[dict[str, Any]] = []
        self._has_failed = False

    def append(self, record: dict[str, Any]) -> None:
        """Append a record and those that are waiting. Log the first failure."""
        self._waiting.append(record)
        try:
            append_records(self._folder, self._waiting)
            self._waiting = []
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot be written (%s); the run goes on, and its records are written when there is room",
                    self._folder / METRICS,
                    error.strerror,
                )
            self._has_failed = True

    def roll_back(self, step: int) -> None:
        """Discard what was logged after `step` and has not been written; `cut_metrics` removes the rest."""
        self._waiting = [record for record in self._waiting if record["step"] <= step]

    def close(self) -> None:
        """Log how many records could not be written."""
        if self._waiting:
            logger.warning(
                "%s lacks %d records, for which there was no room", self._folder / METRICS, len(self._waiting)
            )


def append_records(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append records to metrics.jsonl. Numbers that are not finite become null, because JSON cannot express them.

    Raises OSError if a write fails; the file is then as it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finite = ({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in records)
    text = "".join(json.dumps(record) + "\n" for record in finite).encode()
    with (folder / METRICS).open("a+b", buffering=0) as file:
        start = file.tell()
        file.seek(max(start - 1, 0))
        if file.read(1) not in (b"", b"\n"):  # the end of a line that a crash has cut
            text = b"\n" + text
        try:
            while text:  # a disk that becomes full takes a part first, and then raises
                text = text[file.write(text) :]
        except OSError:
            file.truncate(start)
            raise


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the logged steps, in order. Lines that cannot be read are left out, with a warning."""
    return list(each_step(folder))


def each_step(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what `read_steps` returns: all records of a long run need much memory."""
    metrics = folder / METRICS
    damaged = []
    for number, (_, record) in enumerate(_complete_lines(metrics) if metrics.exists() else (), 1):
        if record is None:
            damaged.append(number)
        elif "out_of_memory" not in record:
            yield _with_nan(record)
    if damaged:
        logger.warning("%s: %d lines cannot be read, the first is line %d", metrics, len(damaged), damaged[0])


def _with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with NaN for null, except for `mfu`, which is null if it is not known."""
    return {key: math.nan if value is None and key != "mfu" else value for key, value in record.items()}


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (line, record) of the lines of the file, without an unfinished last line that a crash may have left.

    The record is None if the line cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, None if it is not one that this program writes."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    if not isinstance(record, dict) or not _is_integer(record.get("step")):
        return None
    return record if "out_of_memory" in record or _has_numbers(record) else None


def _has_numbers(record: dict[str, Any]) -> bool:
    """Return True if a record has all numbers of a step, and nothing else than numbers and generated texts."""
    numbers = [value for key, value in record.items() if key != "samples"]
    return (
        not NUMBERS_OF_A_STEP - record.keys()
        and all(value is None or type(value) is float or _is_integer(value) for value in numbers)
        and _are_texts(record.get("samples", []))
    )


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INT


def _are_texts(samples: Any) -> bool:
    """Return True if these are the texts that a model has generated in a step, [{"prompt", "text"}, ...]."""
    return isinstance(samples, list) and all(
        isinstance(sample, dict)
        and sample.keys() == {"prompt", "text"}
        and all(isinstance(text, str) for text in sample.values())
        for sample in samples
    )


def first_free(path: Path) -> Path:
    """Return the path with {} in its name replaced by the smallest number, from 1, that no file or link has."""
    numbered = (path.with_name(path.name.format(number)) for number in count(1))
    return next(candidate for candidate in numbered if not os.path.lexists(candidate))


@contextmanager
def written_if_possible(path: Path) -> Iterator[None]:
    """Log an OSError of this block, which writes `path`, and go on without the file: training does not depend on it.

    A link to a file is removed first: what it names is not written.
    All files of a run are written in this way, except for checkpoints, metrics.jsonl, and what a start needs.
    """
    try:
        unlink_link(path)
        yield
    except OSError as error:
        logger.warning("%s cannot be written (%s); the run goes on without it", path, error.strerror or error)
        with suppress(OSError):
            path.unlink()  # a file that is cut would be taken for a whole one
