"""Dry runs of the paper's configurations on up to 1024 GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.dryrun.dry_run import DEVICE, HOST, dry_run
from lab.measure.cluster import ClusterSpec
from lab.paper.calibrate import calibrated
from lab.planner.depth import extrapolate, shallow_runs
from zero.formulas.memory import formula, placed

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = ROOT / "configs/clusters/dgx-2.yaml"


def settings_of(name: str, world_size: int, *options: str) -> Settings:
    config = ROOT / f"configs/paper/{name}.yaml"
    world = [f"--dry_run.world_size={world_size}", f"--dry_run.cluster={CLUSTER}"]
    return parse_settings(["--config", str(config), *world, *options])


@pytest.mark.full
@pytest.mark.parametrize("name", ["1t-tensor16", "1t-data1024"])
def test_one_trillion_parameters_fit_a_thousand_gpus(name: str):
    settings, cluster = settings_of(name, 1024), ClusterSpec.load(CLUSTER)
    found = extrapolate(shallow_runs(settings), cluster).at(settings.model.num_layers)
    assert found.parameters == pytest.approx(1e12, rel=0.01)
    assert 16 * found.parameters / 1024 < found.device_peak_bytes < cluster.usable_gpu_bytes


def test_an_extrapolation_from_two_depths_meets_a_third():
    settings, cluster = settings_of("figure2/100b-zero-400", 400, "--model.num_layers=20"), ClusterSpec.load(CLUSTER)
    extrapolation = extrapolate(shallow_runs(settings), cluster)
    recording = dry_run(settings)
    predicted = extrapolation.at(20)
    assert predicted.parameters == recording.state.num_parameters_of_model
    assert predicted.device_peak_bytes == pytest.approx(sum(recording.peak[DEVICE].values()), rel=0.01)
    assert 12 <= extrapolation.max_layers(predicted.device_peak_bytes) <= 20


@pytest.mark.full
def test_the_cluster_file_has_the_constants_that_three_rows_give():
    cluster = ClusterSpec.load(CLUSTER)
    found = calibrated(replace(cluster, gemm_fraction=1.0, node_fraction=1.0))
    assert found.gemm_fraction == pytest.approx(cluster.gemm_fraction, abs=0.001)
    assert found.node_fraction == pytest.approx(cluster.node_fraction, abs=0.001)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world_size", "billions"), [("2-1.5b", 8, 1.5), ("2-10b", 32, 10), ("-1t", 512, 1000)]
)
def test_the_runs_of_deepspeeds_tutorial_fit_their_gpus_and_hosts(
    monkeypatch: pytest.MonkeyPatch, name: str, world_size: int, billions: float
):
    monkeypatch.chdir(ROOT)  # the YAML files name JSON files
    cluster = ClusterSpec.load(CLUSTER)
    settings = settings_of(f"../deepspeed/gpt{name}", world_size)
    recording = dry_run(settings)  # at full depth: the tutorial's buckets are larger than the layers of shallow runs
    device, host = (sum(recording.peak[where].values()) for where in (DEVICE, HOST))
    assert recording.state.num_parameters_of_model == pytest.approx(billions * 1e9, rel=0.05)
    assert device < cluster.gpu_memory_bytes
    assert host * cluster.gpus_per_node < cluster.host_memory_gb * 1e9
    policy, size = settings.zero.policy, world_size // settings.parallel.tensor_size
    of_this_rank = formula(policy, recording.state.num_parameters, size)
    states = placed(of_this_rank, policy, size, settings.offload.offloaded_states)
    assert device > states.accelerator.total
    assert host >= 0.99 * states.host.total  # parameters that stay resident are not on the host
