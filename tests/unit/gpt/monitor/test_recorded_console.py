"""The description, the tables and the rows of runs are as recorded."""

import re

import pytest

from gpt.build.train_state import build, build_mesh
from gpt.monitor import metrics
from gpt.monitor.compare import comparison_table
from gpt.monitor.console import RunConsole, describe_run, memory_table, summary_table
from gpt.monitor.metrics import Throughput, memory_by_kind
from gpt.monitor.out_of_memory import memory_lines
from parallel.world import imitated_world
from tests.recordings import assert_recorded, lines_of
from tests.unit.lab.dryrun.test_projection import shallow
from tests.unit.lab.dryrun.test_recorded_reports import RUNS

PEAK = {"peak_allocated_bytes": 10**8, "peak_reserved_bytes": 2 * 10**8, "reserved_unused_bytes": 10**8}


def records(tokens_per_second: float) -> list[dict[str, object]]:
    """Return the records of three logged steps."""
    return [
        PEAK
        | {
            "step": step,
            "loss": 5.0 / step,
            "tokens": 5_123_456 * step,
            "lr": 1e-4 * step,
            "grad_norm": 1.5,
            "tokens_per_second": tokens_per_second + step,
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


@pytest.mark.parametrize("name", ["stage-1-offload", "stage-2-adamw8bit", "stage-3-muon", "partition-host"])
def test_the_console_of_a_run_is_as_recorded(name: str, capsys: pytest.CaptureFixture[str]):
    chosen = shallow(*RUNS[name][1:])
    train, console = chosen.train, RunConsole(is_quiet=False)
    with imitated_world(0, chosen.dry_run.world_size, 16, "nccl") as world:
        state = build(chosen, build_mesh(chosen, world), world.device)
        console.say(describe_run(state, train, "RUN"))
        console.show(memory_table(state, train))
        for record in records(10_000.0):
            console.log_step(record, train, tokens_per_sample=31.5)
        console.show(summary_table(state, train, records(10_000.0)))
        figures = memory_by_kind(state.model, state.optimizer)
        lines = memory_lines(state, PEAK)
    printed = re.sub(r"^\d\d:\d\d:\d\d", "HH:MM:SS", capsys.readouterr().out, flags=re.MULTILINE)
    assert_recorded(f"console-{name}", printed, *lines, *lines_of(figures))


def test_the_comparison_of_runs_is_as_recorded(capsys: pytest.CaptureFixture[str]):
    without_validation = [{key: value for key, value in one.items() if "valid" not in key} for one in records(2e6)]
    RunConsole(is_quiet=False).show(comparison_table({"a": records(1e6), "b": without_validation}))
    assert_recorded("comparison", capsys.readouterr().out)


def test_the_speed_of_counted_steps_is_as_recorded(monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 14.0, 20.0, 30.0, 31.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    throughput = Throughput(shallow().model, 31.5, num_devices=4, recomputes="blocks", peak_flops=1e9)
    throughput.count(8)
    throughput.count(16)
    first = throughput.measure()  # 4 seconds
    throughput.count(8)
    second = throughput.measure()  # 10 seconds
    assert_recorded("throughput", *lines_of([first, second]))
