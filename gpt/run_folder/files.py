"""The files config.yaml and metrics.jsonl in the folder of a run. Those of an earlier run are renamed, not overwritten.

metrics.jsonl has one JSON object per logged step; a rank that runs out of memory adds one with `out_of_memory`.
"""

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

from parallel.errors import ConfigError

CONFIG, METRICS, LOSS_PLOT, CHECKPOINTS = "config.yaml", "metrics.jsonl", "loss.png", "checkpoints"
WEIGHTS = "weights"
HANG, OUT_OF_MEMORY = "hang", "out_of_memory"  # folders of one file a rank, written only if it happens


def start_run(folder: Path, config: str, last_step: int) -> None:
    """Prepare the folder for a run that continues after `last_step`, or begins if that is 0.

    Metrics after `last_step` are removed, because these steps are run again. If the run begins, old metrics are renamed
    instead. A config.yaml with other settings is renamed too. Raises ConfigError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config_file, metrics = folder / CONFIG, folder / METRICS
        if config_file.exists() and config_file.read_text() != config:
            config_file.rename(first_free(config_file.with_suffix(".{}.yaml")))
        config_file.write_text(config)
        if metrics.exists() and last_step == 0:
            metrics.rename(first_free(metrics.with_suffix(".{}.jsonl")))
        else:
            cut_metrics(folder, last_step)
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written ({error.strerror}); choose another folder") from error


def cut_metrics(folder: Path, last_step: int) -> None:
    """Remove what was logged after `last_step`, because these steps are run again. Raises OSError if a write fails."""
    metrics = folder / METRICS
    if metrics.exists():
        kept = [line for line in _complete_lines(metrics) if json.loads(line)["step"] <= last_step]
        # A new file replaces the old one when it is complete, so that a crash cannot lose the metrics.
        partial = metrics.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(metrics)


def append_record(folder: Path, record: dict[str, Any]) -> None:
    """Append a record to metrics.jsonl. Numbers that are not finite become null, because JSON cannot express them."""
    folder.mkdir(parents=True, exist_ok=True)
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(finite) + "\n")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the logged steps, in order."""
    metrics = folder / METRICS
    records = map(json.loads, _complete_lines(metrics)) if metrics.exists() else []
    return [_with_nan(record) for record in records if "loss" in record]


def _with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with NaN for null, except for `mfu`, which is null if it is not known."""
    return {key: math.nan if value is None and key != "mfu" else value for key, value in record.items()}


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of the file, without the unfinished last line that a crash may have left."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def first_free(path: Path) -> Path:
    """Return the path with {} in its name replaced by the smallest number, from 1, for which no such file exists."""
    numbered = (path.with_name(path.name.format(number)) for number in count(1))
    return next(candidate for candidate in numbered if not candidate.exists())
