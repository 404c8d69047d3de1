"""The front of layouts, the cost of a run, and what plots of a step show."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from gpt.settings.parser import parse_settings
from gpt.settings.run import DryRunSettings
from lab.dryrun import plots
from lab.dryrun.dry_run import DEVICE, Recording, dry_run
from lab.dryrun.plots import busy_shares, highest_moments, kernel_starts, plot_lanes, plot_memory
from lab.dryrun.projection import Task, Timeline, project_recording
from lab.dryrun.run_cost import RunCost
from lab.planner import plan as planner
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout, Prediction
from lab.planner.plan import report_front, report_plan
from lab.planner.plan_report import front, spread
from lab.planner.search import Search
from parallel.memory_kinds import TensorKind
from parallel.validation.errors import ConfigError
from tests.unit.lab.dryrun.test_projection import DGX_2, ROOT, settings, shallow


def test_the_front_holds_what_no_other_item_beats():
    items = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 3.0), (1.0, 3.0), (4.0, 4.0)]
    assert front(items, lambda item: item) == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]


def test_layouts_of_the_front_are_spread_from_the_fastest_to_the_smallest():
    predictions = [
        Prediction(CandidateLayout(1, 2, "none", number), (20 - number) * 1e9, 0.0, float(number), 1, 0.0)
        for number in range(1, 10)
    ]
    slow = dataclasses.replace(predictions[4], seconds=20.0)
    assert [layout.micro_batch_size for layout in spread([slow, *predictions], 3)] == [1, 5, 9]
    assert [layout.micro_batch_size for layout in spread(predictions[:2], 3)] == [1, 2]
    assert spread([], 3) == []


def test_a_run_costs_the_time_of_its_samples():
    chosen = settings("--train.steps=1000", "--train.ramp_up={start: 400, increment: 400, samples: 80000}")
    cluster = dataclasses.replace(DGX_2, dollars_per_gpu_hour=2.0)
    cost = RunCost.of(chosen, 9.0, 400, cluster)
    samples = 200 * 400 + 800 * 800
    assert cost.tokens == samples * chosen.model.seq_length
    assert cost.seconds == pytest.approx(samples / 800 * 9.0)
    assert cost.gpu_hours == pytest.approx(400 * cost.seconds / 3600)
    assert cost.dollars == pytest.approx(2 * cost.gpu_hours)
    assert str(cost) == "737M tokens in 2.25 h, 900 GPU hours, 1,800 dollars"
    assert "dollars" not in str(RunCost.of(chosen, 9.0, 400, DGX_2))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return dry_run(shallow("--activations.store=keep"))


def test_the_history_of_memory_reaches_the_recorded_peak_and_ends_with_what_is_resident(recording: Recording):
    moments = highest_moments(recording)
    assert max(state.total() for _, state in moments) == sum(recording.peak[DEVICE].values())
    assert +moments[-1][1] == recording.resident[DEVICE]
    assert [position for position, _ in moments] == sorted(position for position, _ in moments)
    timeline = project_recording(recording, DGX_2)
    starts = kernel_starts(recording, timeline)
    assert len(starts) == len(recording.kernels) + 1
    assert starts == sorted(starts)
    assert starts[-1] == timeline.seconds


def test_a_lane_is_as_high_as_it_is_busy():
    tasks = [Task("data", "", 0.0, 1.0), Task("host", "", 0.0, 4.0), Task("data", "", 2.5, 4.0)]
    timeline = Timeline(DGX_2, tasks, 4.0)
    np.testing.assert_allclose(busy_shares(timeline, "data", np.arange(5.0)), [1.0, 0.0, 0.5, 1.0])


def test_plots_of_a_step_show_its_kinds_of_memory_the_limit_and_its_lanes(tmp_path: Path, monkeypatch):
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (figures.append(figure), path.touch()))
    recording = dry_run(shallow("--offload.mode=host"))
    timeline = project_recording(recording, DGX_2)
    usable = 2.9 * sum(recording.peak[DEVICE].values())
    near = dataclasses.replace(DGX_2, gpu_memory_gib=(usable + DGX_2.reserved_gb * 1e9) / 2**30)
    plot_lanes(timeline, tmp_path / "lanes.png")
    for name, of_plot in {
        "near": dataclasses.replace(timeline, cluster=near),
        "far": timeline,
        "kernels": None,
    }.items():
        plot_memory(recording, tmp_path / f"{name}.png", of_plot)
    assert {path.stem for path in tmp_path.iterdir()} == {"lanes", "near", "far", "kernels"}
    (lanes,), *of_memory = (figure.axes for figure in figures)
    assert [label.get_text().split(",")[0] for label in lanes.get_yticklabels()] == [*timeline.busy_seconds()][::-1]
    kinds = [kind for kind in TensorKind if recording.peak[DEVICE].get(kind)]
    for (axes,), limit in zip(of_memory, ([f"limit, {usable / 1e9:.1f} GB"], [], []), strict=True):
        shown = [text.get_text() for text in axes.get_legend().get_texts()]
        assert set(kinds) <= set(shown)
        assert [text for text in shown if "limit" in text] == limit


def test_a_plot_of_many_kernels_shows_the_highest_moment_of_each_interval(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
):
    totals = [(position, state.total()) for position, state in recording.memory.states()]
    monkeypatch.setattr(plots, "NUM_MOMENTS", 4)
    *highest, last = [(position, state.total()) for position, state in highest_moments(recording)]
    width = -(-(len(recording.kernels) + 1) // 4)
    assert [position // width for position, _ in highest] == [0, 1, 2, 3]
    for number, (_, total) in enumerate(highest):
        assert total == max(each for position, each in totals if position // width == number)
    assert last == (len(recording.kernels), totals[-1][1])


class Extrapolation:
    """A dry run in which twice as many GPUs take more than half of the time, and less memory."""

    def __init__(self, search: Search, layout: CandidateLayout):
        self.estimate = Estimate(1e9, 5e12 / search.world_size + layout.stage, 0.0, 4e3 / search.world_size + 1)

    def at(self, _num_layers: int) -> Estimate:
        return self.estimate

    def max_layers(self, _device_bytes: float, _host_bytes: float) -> int:
        return 77


@pytest.fixture
def extrapolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "extrapolate", lambda *arguments: Extrapolation(*arguments))


@pytest.mark.parametrize(("kind", "expected"), [([], "chosen: tensor 16, "), (["--largest"], "77 layers")])
def test_the_command_prints_a_plan_and_writes_the_settings_of_its_best_run(
    extrapolation: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: list[str], expected: str
):
    config = f"--config={ROOT / 'configs/paper/figure2/100b-zero-400.yaml'}"
    cluster, output = f"--cluster={ROOT / 'configs/clusters/dgx-2.yaml'}", tmp_path / "folder/plan.yaml"
    figures = "--tokens=1B", "--dollars_per_gpu_hour=2", "--reserved_gb=3.01", f"--output={output}"
    free = "--free", "zero.stage", "train.micro_batch_size"
    planner.main([cluster, "--nodes=25", "--verify=1", *free, *kind, *figures, config])
    printed = capsys.readouterr().out
    assert expected in printed
    assert f"scripts/launch/torchrun.sh --config {output}" in printed
    by_time = f"--config {output} --checkpoint.every_minutes 30"
    assert printed.splitlines()[-1] == f"sbatch --nodes=25 --gpus-per-node=16 scripts/launch/slurm.sbatch {by_time}"
    record = json.loads(output.with_suffix(".dry_run.json").read_text())
    assert (record["gpus"], record["fits"], record["layout"]["tensor_size"]) == (400, True, 16)
    chosen = parse_settings(["--config", str(output)])
    assert (chosen.train.global_batch_size, chosen.train.steps) == (800, math.ceil(1e9 / 800 / 1024))
    assert (chosen.model.num_layers == 77) == bool(kind)
    assert chosen.dry_run == DryRunSettings()
    if not kind:
        assert "may be used: --reserved_gb=3.01" in printed
        assert re.search(r"MFU [\d.]+%, [\d,]+ tokens/s a GPU", printed)
        assert re.search(r"1B tokens in .* GPU hours, [\d,]+ dollars", printed)
    with pytest.raises(ConfigError, match=r"--output=.* cannot be written"):
        planner.write_settings(chosen, output / "plan.yaml")


def test_the_planner_compares_numbers_of_nodes(extrapolation: None, tmp_path: Path):
    console = Console(width=120, record=True, file=io.StringIO())
    plot = tmp_path / "folder/front.png"
    search = Search(settings("--activations.store=keep"), DGX_2, 400, ("activations.store",), num_to_verify=1)
    of_best, chosen = report_front(search, [25, 12, 50], plot, console)
    assert of_best.num_nodes == 50
    assert chosen.train.global_batch_size == 800
    text = console.export_text()
    assert "does not fit: tensor 16, stage 0" in text
    assert "12 nodes: no layout divides train.global_batch_size=800 sequences over 192 ranks" in text
    rows = [line for line in text[text.index("Front:") :].splitlines() if "stage" in line]
    assert [row.split()[1] for row in rows] == ["50", "25"], "less time, and fewer GPU hours"
    assert plot.exists()
    with pytest.raises(ConfigError, match=r"no layout fits on --nodes=\[12\]"):
        report_front(search, [12], plot, console)
    with pytest.raises(ConfigError, match=r"front.png/file/front.png cannot be written"):
        report_front(search, [25], plot / "file/front.png", console)


def test_a_plan_that_does_not_fit_says_what_would(extrapolation: None, monkeypatch: pytest.MonkeyPatch):
    shape = "--model.num_layers=40", "--model.hidden_size=5120", "--train.global_batch_size=64", "--zero.stage=1"
    fixed, console = ("zero.stage", "parallel.tensor_size"), Console(quiet=True)
    large = Search(settings(*shape, "--parallel.tensor_size=1"), DGX_2, 16, fixed)
    with pytest.raises(ConfigError, match=r"does not fit on 16 GPUs: .* too much; use a smaller model"):
        report_plan(large, console)
    monkeypatch.setattr(Extrapolation, "at", lambda self, _num_layers: Estimate(1e9, 20e9, 0.0, 1.0))
    with pytest.raises(ConfigError, match=r"; it fits with --parallel.tensor_size=4 \(20.0 GB\), or with --zero"):
        report_plan(large, console)
