"""Weights & Biases gets what metrics.jsonl gets; a tracking that fails never ends a run."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import options, prepare_corpus, run_on_rank
from tests.ranks import run_ranks

BLOCK_BYTES, FILE_HEADER_BYTES, RECORD_HEADER = 32768, 7, struct.Struct("<IHB")
FULL, LAST = 1, 4


def offline_records(file: Path) -> Iterator:
    """The records of an offline run: LevelDB's log format around protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), FILE_HEADER_BYTES, []
    while position + RECORD_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < RECORD_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size
        parts.append(data[position : position + length])
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def history_of(file: Path) -> list[dict]:
    records = [record for record in offline_records(file) if record.HasField("history")]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item} for r in records]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def test_an_offline_run_holds_the_same_metrics_the_settings_and_the_code_version(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", wandb__mode="offline", train__sample_tokens=0)
    logged = run_ranks(2, run_on_rank, arguments, init_process_group=False)[0]
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # its own process writes the file, and not before it likes
    while len(history_of(file)) < len(logged) and time.monotonic() < deadline:
        time.sleep(0.2)
    history = history_of(file)
    assert [{key: row[key] for key in expected} for row, expected in zip(history, logged, strict=True)] == logged
    (run,) = [record.run for record in offline_records(file) if record.HasField("run")][:1]
    config = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert config["zero"]["stage"] == 2
    assert len(config["code_version"]) >= len("unknown")


def test_a_tracking_that_cannot_start_does_not_stop_the_run(corpus, tmp_path):
    (tmp_path / "run" / "wandb_run_id").mkdir(parents=True)  # where a file should be
    arguments = options(corpus, tmp_path / "run", wandb__mode="offline")
    assert len(run_ranks(1, run_on_rank, arguments, init_process_group=False)[0]) == 6
