"""The front of layouts, the cost of a run, and what plots of a step show."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.collections import Collection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.text import Annotation
from rich.console import Console

from lab.dryrun.dry_run import DEVICE, dry_run
from lab.dryrun.plots import busy_shares, highest_moments, kernel_starts, plot_lanes, plot_memory
from lab.dryrun.projection import Task, Timeline, project_recording
from lab.dryrun.run_cost import RunCost
from lab.planner import plan as planner
from lab.planner import plots
from lab.planner.depth import Estimate
from lab.planner.front import Choice, front, front_table, spread
from lab.planner.layouts import CandidateLayout, Prediction
from lab.planner.plan import report_front
from lab.planner.plots import plot_front
from parallel.errors import ConfigError
from tests.recordings import assert_recorded
from tests.unit.lab.dryrun.test_projection import DGX_2, settings, shallow
from tests.unit.lab.planner.test_plan import NOT_CALIBRATED, num_columns


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


def test_the_history_of_memory_reaches_the_recorded_peak_and_ends_with_what_is_resident():
    recording = dry_run(shallow("--activations.store=keep"))
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


def shown(figure: Figure, path: Path) -> Iterator[str]:
    """Yield lines with the texts of a plot and the data that its artists show."""
    (axes,) = figure.axes
    yield f"{path.name}: {image.imread(path).shape} pixels, {axes.get_title()}"
    (grid, *_), (x, _) = axes.get_xgridlines(), axes.margins()
    grid_alpha = grid.get_alpha() if grid.get_visible() else 0
    yield f"  axes: {axes.get_xlabel()}, {axes.get_ylabel()}, margin {x}, grid of opacity {grid_alpha}"
    yield f"  ticks: {[f'{tick.get_position()[1]:.6g} {tick.get_text()}' for tick in axes.get_yticklabels()]}"
    if legend := axes.get_legend():
        corner = legend.get_bbox_to_anchor().transformed(axes.transAxes.inverted()).p0
        yield f"  legend: {[text.get_text() for text in legend.get_texts()]} at {corner}"
    for artist in axes.get_children():
        match artist:
            case Line2D():
                yield f"  line: {artist.get_linestyle()} at {np.round(artist.get_xydata(), 3).tolist()}"
            case PathCollection():
                points = np.round(artist.get_offsets(), 3).tolist()
                yield f"  points: {points}, {artist.get_sizes()}, {np.round(artist.get_facecolor(), 2).tolist()}"
            case Collection():
                corners = np.concatenate([path.vertices for path in artist.get_paths()])
                color = np.round(artist.get_facecolor(), 2).tolist()
                means = np.round(corners.mean(axis=0), 7)
                yield f"  {artist.get_label()}: {len(corners)} corners, means {means}, {color}"
            case StepPatch():
                values, edges, baseline = artist.get_data()
                color = np.round(artist.get_facecolor(), 2).tolist()
                mean = values.mean() - baseline
                yield f"  lane: {len(values)} values of mean {mean:.5f} from {baseline} to {edges[-1]:.6g}, {color}"
            case Annotation():
                place = f"{np.round(artist.xy, 3)} + {artist.xyann}"
                yield f"  note: {artist.get_text()} at {place}, {artist.get_fontsize()} points"


def test_plots_are_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures: list[Figure] = []
    close = plots.pyplot.close
    monkeypatch.setattr(plots.pyplot, "close", figures.append)
    recording = dry_run(shallow("--offload.mode=host"))
    timeline = project_recording(recording, DGX_2)
    peak = sum(recording.peak[DEVICE].values())
    near, far = (
        dataclasses.replace(DGX_2, gpu_memory_gib=(factor * peak + DGX_2.reserved_gb * 1e9) / 2**30)
        for factor in (2.9, 3.1)
    )
    plot_lanes(timeline, tmp_path / "lanes.png")
    on_near, on_far = (dataclasses.replace(timeline, cluster=cluster) for cluster in (near, far))
    plots_of_memory = {"near": on_near, "far": on_far, "kernels": None}
    for name, of_plot in plots_of_memory.items():
        plot_memory(recording, tmp_path / f"{name}.png", of_plot)
    for name, price in (("hours", None), ("dollars", 2.0)):
        cluster = dataclasses.replace(NOT_CALIBRATED, dollars_per_gpu_hour=price)
        choices = [
            Choice(
                num_nodes, CandidateLayout(1, 2, "none", 8), estimate, RunCost.of(settings(), 9.0, num_nodes, cluster)
            )
            for num_nodes, estimate in ((2, Estimate(1e9, 20e9, 0, 0, 2.0)), (1, Estimate(1e9, 24e9, 0, 0, 4.0)))
        ]
        plot_front(choices, choices[1:], tmp_path / f"{name}.png", cluster)
    names = ["lanes", *plots_of_memory, "hours", "dollars"]
    lines = [
        line for figure, name in zip(figures, names, strict=True) for line in shown(figure, tmp_path / f"{name}.png")
    ]
    assert_recorded("plots", *lines)
    for figure in figures:
        close(figure)


def test_a_plot_of_many_kernels_shows_the_highest_moment_of_each_interval(monkeypatch: pytest.MonkeyPatch):
    recording = dry_run(shallow("--activations.store=keep"))
    totals = [(position, state.total()) for position, state in recording.memory.states()]
    monkeypatch.setattr(plots, "NUM_MOMENTS", 4)
    *highest, last = [(position, state.total()) for position, state in highest_moments(recording)]
    width = -(-(len(recording.kernels) + 1) // 4)
    assert [position // width for position, _ in highest] == [0, 1, 2, 3]
    for number, (_, total) in enumerate(highest):
        assert total == max(each for position, each in totals if position // width == number)
    assert last == (len(recording.kernels), totals[-1][1])


def test_the_planner_compares_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Extrapolation:
        """Twice as many GPUs take more than half of the time, and less memory."""

        def __init__(self, layout: CandidateLayout, _settings: object, _cluster: object, world_size: int):
            self.estimate = Estimate(1e9, 5e12 / world_size + layout.stage, 0.0, 0.0, 4e3 / world_size + 1)

        def at(self, _num_layers: int) -> Estimate:
            return self.estimate

    monkeypatch.setattr(planner, "extrapolate_layout", Extrapolation)
    console = Console(width=120, record=True)
    plot = tmp_path / "folder/front.png"
    num_nodes, options = report_front(settings(), DGX_2, [25, 12, 50], 1, plot, console)
    assert num_nodes == 50
    assert "--train.global_batch_size=800" in options
    text = console.export_text()
    assert "does not fit: tensor 16, stage 0" in text
    assert "12 nodes: no layout divides train.global_batch_size=800 sequences over 192 ranks" in text
    rows = [line for line in text[text.index("Front:") :].splitlines() if "stage" in line]
    assert [row.split()[1] for row in rows] == ["50", "25"], "less time, and fewer GPU hours"
    assert plot.exists()
    with pytest.raises(ConfigError, match=r"no layout fits on --nodes=\[12\]"):
        report_front(settings(), DGX_2, [12], 1, plot, console)
    with pytest.raises(ConfigError, match=r"front.png/file/front.png cannot be written"):
        report_front(settings(), DGX_2, [25], 1, plot / "file/front.png", console)


def test_the_table_of_the_front_has_prices_if_the_cluster_has_one():
    estimate = Estimate(1e9, 20e9, 0.0, 0.0, 2.0)
    for price in (None, 2.0):
        cluster = dataclasses.replace(DGX_2, dollars_per_gpu_hour=price, calibrated=price is not None)
        choice = Choice(25, CandidateLayout(1, 2, "none", 8), estimate, RunCost.of(settings(), 2.0, 400, cluster))
        table = front_table([choice], cluster)
        assert ("dollars" in [column.header for column in table.columns]) == (price is not None)
        assert ("not calibrated" in str(table.title)) == (price is None)
        assert num_columns(table) <= 80
