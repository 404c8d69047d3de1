"""The description, the tables and the rows of a run are as recorded."""

import re

import pytest

from gpt.builder.train_state import build, build_mesh
from gpt.monitor.console import RunConsole, describe_run, memory_table, summary_table
from gpt.monitor.metrics import memory_by_kind
from gpt.monitor.out_of_memory import memory_lines
from parallel.world import imitated_world
from tests.recordings import assert_recorded, lines_of
from tests.unit.lab.dryrun.test_projection import shallow
from tests.unit.lab.dryrun.test_recorded_reports import RUNS

PEAK = {"peak_allocated_bytes": 10**8, "peak_reserved_bytes": 2 * 10**8, "reserved_unused_bytes": 10**8}


RECORDS = [
    PEAK
    | {
        "step": step,
        "loss": 5.0 / step,
        "tokens": 5_123_456 * step,
        "lr": 1e-4 * step,
        "grad_norm": 1.5,
        "tokens_per_second": 10_000.0 + step,
        "mfu": 0.25,
        "loss_scale": 2.0**12,
        "model_tflops_per_device": 50.125,
        "data_axis_bytes": 1_234_567,
        "tensor_axis_bytes": 234_567,
        "skipped_steps": step // 2,
        "allocation_retries": 1,
    }
    | ({"validation_loss": 1.5, "validation_perplexity": 4.48} if step == 3 else {})
    for step in (1, 2, 3)
]


def test_the_console_of_a_run_is_as_recorded(capsys: pytest.CaptureFixture[str]):
    chosen = shallow(*RUNS["stage-1-offload"][1:])
    train, console = chosen.train, RunConsole(is_quiet=False)
    with imitated_world(0, chosen.dry_run.world_size, 16, "nccl") as world:
        state = build(chosen, build_mesh(chosen, world), world.device)
        console.say(describe_run(state, train, "RUN"))
        console.show(memory_table(state, train))
        for record in RECORDS:
            console.log_step(record, train, tokens_per_sample=31.5)
        console.show(summary_table(state, train, RECORDS))
        figures = memory_by_kind(state.model, state.optimizer)
        lines = memory_lines(state, PEAK)
    printed = re.sub(r"^\d\d:\d\d:\d\d", "HH:MM:SS", capsys.readouterr().out, flags=re.MULTILINE)
    assert_recorded("console-stage-1-offload", printed, *lines, *lines_of(figures))
