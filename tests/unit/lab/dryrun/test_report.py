"""The report of a dry run: what fits, up to the last byte, and its line about the host's memory."""

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from gpt.monitor.console import RunConsole
from gpt.settings.optimizer import OptimizerSettings
from lab.dryrun.dry_run import DEVICE, HOST, Recording, dry_run
from lab.dryrun.projection import Timeline, project_recording
from lab.dryrun.report import make_report, run_and_report
from lab.measure.cluster import ClusterSpec
from lab.planner.depth import Estimate
from lab.planner.layouts import CandidateLayout, Prediction, fits
from lab.planner.plan_report import constraint_lines, too_large_line
from lab.planner.search import Search
from parallel.memory_kinds import TensorKind
from parallel.validation.errors import ConfigError
from tests.pairwise import noting, pairwise
from tests.unit.lab.dryrun.test_projection import DGX_2, ROOT, shallow
from zero.activations.stores import STORES
from zero.core.partition.config import DTYPES

FACTORS = {
    "optimizer.name": list(get_args(get_type_hints(OptimizerSettings)["name"])),
    "activations.store": ["none", "selective", "auto", *STORES],
    "train.precision": list(DTYPES),
    "zero.stage": [0, 1, 2, 3],
    "offload.mode": ["accelerator", "host"],
}
EACH_ONCE = [
    {name: values[number % len(values)] for name, values in FACTORS.items()}
    for number in range(max(map(len, FACTORS.values())))
]
OFFLOADED = shallow("--offload.mode=host")  # of 4 ranks


@pytest.fixture(scope="module")
def recording() -> Recording:
    return dry_run(OFFLOADED)


@pytest.mark.parametrize(
    "cases", [pytest.param(EACH_ONCE, id="few"), pytest.param(pairwise(**FACTORS), id="pairs", marks=pytest.mark.full)]
)
def test_every_choice_of_the_settings_has_a_dry_run(cases: list[dict[str, Any]]):
    for case in cases:
        with noting(case):
            chosen = (f"--{name}={value}" for name, value in case.items())
            found = dry_run(shallow("--model.num_layers=1", "--dry_run.backend=gloo", *chosen))
            where = HOST if case["offload.mode"] == "host" else DEVICE
            assert found.resident[where][TensorKind.MOMENTS] > 0


def test_a_budget_of_activations_is_said_to_have_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = "--train.compile=blocks", "--activations.store=none", "--model.dropout=0", "--activations.budget=0.5"
    chosen = shallow(*options, f"--run.dir={tmp_path}")
    run_and_report(chosen, RunConsole(is_quiet=False))
    line = "activations.budget=0.5 is not priced: a step may need less memory, and more time, than is stated here"
    assert line in " ".join(capsys.readouterr().out.split())
    assert [*constraint_lines(chosen, {})][-1] == line, "of the planner"


@pytest.mark.parametrize("options", [["--zero.stage=2"], ["--zero.stage=3", "--offload.mode=host"]], ids=["2", "3"])
def test_micro_batches_that_are_not_run_are_counted(options: list[str], monkeypatch: pytest.MonkeyPatch):
    chosen = shallow(*options, "--train.global_batch_size=24", "--train.micro_batch_size=1")  # 6 of each rank
    reports = []
    for most in (3, 6):
        monkeypatch.setattr("lab.dryrun.dry_run.MAX_MICRO_BATCHES", most)
        recording = dry_run(chosen)
        reports.append(make_report(recording, chosen, project_recording(recording, DGX_2)))
    few, all_of_them = reports

    def counted(report: dict[str, Any]) -> list[object]:
        rows = [
            (row["axis"], row["op"], row["phase"], row["count"], row["wire_bytes"]) for row in report["collectives"]
        ]
        kernels = {
            (row["phase"], row["name"]): (row["count"], row["bytes"])
            for row in report["kernels"]
            if row["phase"] != "setup"  # the mean of the losses
        }
        return [report["traffic_bytes"], report["counted_flops"], rows, kernels]

    assert counted(few) == counted(all_of_them)
    peaks = [sum(report["peak_bytes"][DEVICE].values()) for report in reports]
    assert 0 <= peaks[1] - peaks[0] <= 3 * 4, "a loss each"
    for name in ("seconds", "busy_seconds"):
        assert few["step"][name] == pytest.approx(all_of_them["step"][name], rel=1e-2)  # of the overlap at the ends


def with_memory(device_bytes: int, host_bytes: int, gpus_per_node: int) -> ClusterSpec:
    """Return a cluster whose GPUs and nodes have this memory beside what is reserved."""
    cluster = dataclasses.replace(
        DGX_2,
        gpu_memory_gib=(device_bytes + 1e9) / 2**30,
        reserved_gb=1.0,
        host_memory_gb=host_bytes / 1e9,
        gpus_per_node=gpus_per_node,
    )
    assert (cluster.usable_gpu_bytes, cluster.host_memory_gb * 1e9) == (device_bytes, host_bytes)
    return cluster


@pytest.mark.parametrize(("gpus_per_node", "ranks_of_a_node"), [(2, 2), (4, 4), (16, 4)])
@pytest.mark.parametrize(
    ("less", "fits_device", "fits_host"), [((0, 0), True, True), ((1, 0), False, True), ((0, 1), True, False)]
)
def test_a_run_fits_up_to_the_last_byte_of_a_device_and_of_a_node(
    recording: Recording,
    gpus_per_node: int,
    ranks_of_a_node: int,
    less: tuple[int, int],
    fits_device: bool,
    fits_host: bool,
):
    on_device, on_host = (sum(recording.peak[where].values()) for where in (DEVICE, HOST))
    cluster = with_memory(on_device - less[0], on_host * ranks_of_a_node - less[1], gpus_per_node)
    report = make_report(recording, OFFLOADED, Timeline(cluster, [], 2.0))
    assert report["node_host_bytes"] == on_host * ranks_of_a_node
    assert (report["fits"], report["fits_host"]) == (fits_device, fits_host)


@pytest.mark.parametrize(
    ("on_device", "on_host", "reason"),
    [
        (8e9, 64e9, None),
        (8e9 + 3e8, 64e9, "0.3 GB too much on a GPU"),
        (8e9, 66e9, "2 GB too much on a host"),
        (9e9, 66e9, "1.0 GB too much on a GPU"),
    ],
)
def test_a_layout_fits_a_gpu_and_a_host_and_a_line_says_what_is_too_large(
    on_device: float, on_host: float, reason: str | None
):
    cluster = with_memory(8 * 10**9, 64 * 10**9, gpus_per_node=4)
    layout = CandidateLayout(1, 2, "keep", 8)
    prediction = Prediction(layout, on_device, on_host, 1.0, 1, 1.0)
    estimate = Estimate(1e9, on_device, on_host / 4, 1.0)
    assert fits(prediction, cluster) == Search(OFFLOADED, cluster, 4).fits(estimate) == (reason is None)
    if reason:
        line = f"does not fit: {layout}: {reason}"
        assert too_large_line(prediction, cluster, []) == line
        assert too_large_line(prediction, cluster, ["a", "b"]) == f"{line}; it fits with a or b"


def test_a_job_that_is_smaller_than_a_node_has_the_tensor_groups_that_its_own_ranks_allow():
    dimensions = "--model.hidden_size=48", "--model.num_heads=6", "--model.vocab_multiple=6", "--parallel.tensor_size=3"
    cluster = f"--dry_run.cluster={ROOT / 'configs/clusters/dgx-2.yaml'}"
    assert dry_run(shallow(*dimensions, "--dry_run.world_size=6", cluster)).state.mesh.tensor.size == 3
    with pytest.raises(ConfigError, match=r"parallel\.tensor_size=3 does not divide the 16 ranks of a node"):
        dry_run(shallow(*dimensions, "--dry_run.world_size=48", "--train.global_batch_size=32", cluster))
