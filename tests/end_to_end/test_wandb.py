"""Weights & Biases gets what metrics.jsonl gets; a failure of tracking never ends a run."""

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt.run_folder.files import read_steps
from tests.end_to_end.runs import EVALUATED, options
from tests.programs import run_program, start_forked, wait_for_end, wait_until

BLOCK_BYTES, FILE_HEADER_BYTES, RECORD_HEADER = 32768, 7, struct.Struct("<IHB")
FULL, LAST = 1, 4


def offline_records(file: Path) -> Iterator:
    """Return the records of an offline run so far: protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), FILE_HEADER_BYTES, []
    while position + RECORD_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < RECORD_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, position)
        position += RECORD_HEADER.size + length
        if position > len(data):
            return
        parts.append(data[position - length : position])
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def history_of(records: list) -> list[dict]:
    rows = [record.history.item for record in records if record.HasField("history")]
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]


def records_until_exit(folder: Path) -> list:
    """Return the records of the newest offline run, once a process of W&B has written that the run has ended."""
    (file,) = (folder / "wandb" / "latest-run").glob("*.wandb")
    wait_until(lambda: any(record.HasField("exit") for record in offline_records(file)))
    return list(offline_records(file))


def run_tracked(*words: str, **environment: str) -> int | None:
    """Run a program in a process of its own: W&B reads the environment once, and leaves a service running."""
    environment |= {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    return wait_for_end(start_forked(Path(os.devnull), run_program, *words, **environment))


def test_a_run_that_is_killed_and_resumed_is_one_continuous_curve_with_texts_settings_and_checkpoints(corpus, tmp_path):
    """The run is killed after step 8, with a checkpoint of step 6; W&B loses what it has not written by then."""
    key, run_dir = "0123456789" * 4, tmp_path / "run"
    settings = {"wandb__mode": "offline", "wandb__group": "trials", "wandb__tags": "[a, b]", "checkpoint__every": 3}
    settings |= {"train__layer_grad_norms_every": 2, "train__sample_every": 4, "train__steps": 12}
    settings |= EVALUATED | {"train__sample_tokens": 4}
    arguments = options(corpus, run_dir, **settings)
    kill = "-m", "lab.faults.failing_run", "--fault", "0:0:log:9", "--"
    assert run_tracked(*kill, *arguments, WANDB_API_KEY=key) == -signal.SIGKILL
    assert len(read_steps(run_dir)) == 8
    assert run_tracked("pretrain_gpt.py", *arguments, WANDB_API_KEY=key) == 0

    logged = read_steps(run_dir)
    texts = {record["step"]: record.pop("samples") for record in logged if "samples" in record}
    records = records_until_exit(run_dir)
    history = history_of(records)
    assert [row["_step"] for row in history] == list(range(1, 13))
    assert [{key: row[key] for key in expected} for row, expected in zip(history, logged, strict=True)] == logged
    files = run_dir / "wandb" / "latest-run" / "files"
    tables = {
        row["step"]: json.loads((files / row["samples/path"]).read_text()) for row in history if "samples/path" in row
    }
    rows = {step: [[text["prompt"], text["text"]] for text in texts[step]] for step in tables}
    assert {step: table["data"] for step, table in tables.items()} == rows
    assert rows.keys() >= {8, 12}
    run = next(record.run for record in records if record.HasField("run"))
    run_id = (run_dir / "wandb_run_id").read_text()
    assert {file.name for file in (run_dir / "wandb").glob("offline-run-*/*.wandb")} == {f"run-{run_id}.wandb"}
    config = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert config["zero"]["stage"] == 2
    assert len(config["code_version"]) >= len("unknown")
    assert (run.run_group, list(run.tags)) == ("trials", ["a", "b"])
    checkpoints = [set(r.artifact.aliases) for r in records if r.artifact.type == "checkpoint"]
    assert checkpoints == [{"latest", "step-00000009"}, {"latest", "step-00000012"}]
    assert [record.alert.title for record in records if record.HasField("alert")] == ["run: exit"]
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert [path for path in written if key.encode() in path.read_bytes()] == []


@pytest.mark.full
def test_a_run_whose_wandb_cannot_be_reached_trains_on_and_is_kept_for_later(corpus, tmp_path):
    environment = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    arguments = options(corpus, tmp_path / "run", wandb__mode="online")
    assert run_tracked("pretrain_gpt.py", *arguments, **environment) == 0
    assert len(read_steps(tmp_path / "run")) == 6
    assert [row["step"] for row in history_of(records_until_exit(tmp_path / "run"))] == [1, 2, 3, 4, 5, 6]
