"""The projection, the profile of collectives and the planner, compared with known times and layouts."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from data.documents import DocumentBatch
from gpt.monitor.collectives import profile
from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from gpt.shape.flops import hardware_flops
from lab.dryrun.collectives import main as compare
from lab.dryrun.costs.collectives import MeshShape, collective_seconds
from lab.dryrun.dry_run import DEVICE, HOST, blank_micro_batches, dry_run
from lab.dryrun.projection import project
from lab.measure.cluster import ClusterSpec
from lab.measure.kernel_costs import kernel_seconds
from lab.observe.kernel_log import Kernel
from parallel.memory_kinds import TensorKind
from parallel.validation.errors import ConfigError
from tests.unit.lab.dryrun.test_costs import event

ROOT = Path(__file__).resolve().parents[4]
DGX_2 = dataclasses.replace(
    ClusterSpec.load(ROOT / "configs/clusters/dgx-2.yaml"),
    gemm_fraction=0.5,
    memory_fraction=1.0,
    node_fraction=0.32,
    kernel_seconds=1e-9,
    hop_seconds=1e-9,
)
SHAPE = MeshShape(data_size=25, tensor_size=16)


def memory_bound(seconds: float) -> Kernel:
    return Kernel("add", "forward", int(seconds * 900e9), torch.float16)


def test_a_product_of_whole_tiles_runs_at_the_calibrated_fraction_of_the_peak():
    kernel = Kernel("mm", "forward", 0, torch.float16, product=(1, 128 * 80, 128 * 4, 4096))
    assert kernel_seconds(kernel, DGX_2) == pytest.approx(kernel.flops / (125e12 * 0.5))
    one_tile = dataclasses.replace(kernel, product=(1, 128, 128, 4096))
    assert kernel_seconds(one_tile, DGX_2) == pytest.approx(80 * one_tile.flops / (125e12 * 0.5)), "79 idle"


def test_a_kernel_takes_as_long_as_the_slower_of_arithmetic_and_memory_and_no_less_than_its_launch():
    product = (1, 128 * 80, 128 * 4, 4096)
    computing = kernel_seconds(Kernel("mm", "forward", 0, torch.float16, product), DGX_2)
    for seconds in (0.5 * computing, 2 * computing):
        both = dataclasses.replace(memory_bound(seconds), product=product)
        assert kernel_seconds(both, DGX_2) == pytest.approx(max(seconds, computing))
    assert kernel_seconds(memory_bound(0.0), dataclasses.replace(DGX_2, kernel_seconds=1e-6)) == 1e-6


@pytest.mark.parametrize(("op", "num_hops"), [("all_gather", 15), ("reduce_scatter", 15), ("all_reduce", 30)])
def test_a_small_message_takes_the_latency_of_every_hop(op, num_hops):
    slow = dataclasses.replace(DGX_2, hop_seconds=1e-3)
    assert collective_seconds(event(op, "tensor", 16, 16), slow, SHAPE) == pytest.approx(num_hops * 1e-3)


@pytest.mark.parametrize(
    ("op", "axis", "size", "shape", "rate"),
    [
        ("all_reduce", "tensor", 16, SHAPE, 150e9),  # inside a node
        ("reduce_scatter", "data", 25, SHAPE, 2e9),  # 16 rings share 32 GB/s of a node
        ("all_gather", "data", 100, MeshShape(100, 4), 8e9),  # 4 rings
        ("all_gather", "data", 400, MeshShape(400, 1), 12.5e9),  # one ring has one network card
        ("all_reduce", "tensor", 64, MeshShape(6, 64), 32e9),  # a tensor group that spans nodes
    ],
)
def test_a_ring_runs_at_the_rate_of_its_slowest_link(op, axis, size, shape, rate):
    found = event(op, axis, size, 10**9)
    assert collective_seconds(found, DGX_2, shape) == pytest.approx(found.wire_bytes / rate, rel=1e-3)


def test_a_collective_overlaps_the_computation_until_it_is_waited_for():
    half_second = event("reduce_scatter", "data", 25, int(0.5 * 2e9 * 25 / 24))
    kernels = [memory_bound(1.0), memory_bound(0.2), memory_bound(1.0)]
    for launched, awaited, expected in [(1, 2, 2.5), (1, 3, 2.2), (0, 0, 2.7), (3, 3, 2.7)]:
        chosen = dataclasses.replace(half_second, launched=launched, awaited=awaited)
        assert project(kernels, [chosen], DGX_2, SHAPE).seconds == pytest.approx(expected, rel=1e-3)
    two = [dataclasses.replace(half_second, launched=0, awaited=3)] * 2
    lane = [task for task in project(kernels, two, DGX_2, SHAPE).tasks if task.lane == "data"]
    assert lane[1].start == lane[0].end, "one after the other on their axis"


def test_the_next_step_waits_for_a_collective_that_is_awaited_before_it_is_launched():
    half_second = event("all_gather", "data", 25, int(0.5 * 2e9 * 25 / 24), launched=3, awaited=1)
    for first, expected in [(0.2, 2.5), (0.7, 2.7)]:
        kernels = [memory_bound(first), memory_bound(1.0), memory_bound(1.0)]
        timeline = project(kernels, [half_second], DGX_2, SHAPE)
        assert timeline.seconds == pytest.approx(expected, rel=1e-3)
        assert sum(task.end - task.start for task in timeline.tasks) == pytest.approx(2.5 + first, rel=1e-3)
        assert max(task.end for task in timeline.tasks) > timeline.seconds, "the gather ends in the next step"


def settings(*options: str) -> Settings:
    return parse_settings(["--config", str(ROOT / "configs/paper/figure2/100b-zero-400.yaml"), *options])


def shallow(*options: str) -> Settings:
    tiny = ["--model.num_layers=2", "--model.hidden_size=64", "--model.num_heads=8", "--model.seq_length=32"]
    batch = ["--train.micro_batch_size=2", "--train.global_batch_size=8", "--parallel.tensor_size=2"]
    return settings(*tiny, *batch, "--model.vocab_size=500", "--dry_run.world_size=4", *options)


def test_a_collective_that_is_waited_for_before_any_computation_is_blocking():
    events = [event("all_reduce", "data", 2, 100, launched, awaited) for launched, awaited in [(0, 0), (3, 5), (8, 8)]]
    (row,) = profile(events, 10)
    assert (row["blocking"], row["first_position"], row["last_position"]) == (2, 0.0, 0.8)


def test_the_command_compares_a_real_run_with_a_dry_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = profile([event("all_reduce", "data", 2, 100)] * 2, 1.0)
    for name, file in (("real", "collectives.json"), ("dry", "report.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps({"collectives": rows}))
    (tmp_path / "none").mkdir()
    compare([str(tmp_path / "real"), str(tmp_path / "dry")])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-2].strip("│").split("│")]
    assert cells == ["data", "all_reduce", "backward", "2", "2", "0.000", "0.000"]
    (tmp_path / "list.json").write_text("[1]")
    for name in ("none", "list.json"):
        with pytest.raises(SystemExit) as ended:
            compare([str(tmp_path / "real"), str(tmp_path / name)])
        assert ended.value.code == 2
        assert re.search(rf"{name} has no profile of collectives( \(.*\))?; name the folder", capsys.readouterr().err)


@pytest.mark.parametrize("store", ["none", "keep"])
def test_counted_flops_equal_the_formula(store):
    chosen = shallow(f"--activations.store={store}", "--model.vocab_size=512", "--activations.layers_per_checkpoint=1")
    counted = sum(kernel.flops for kernel in dry_run(chosen).kernels)
    expected = hardware_flops(chosen.model, 8, "blocks" if store == "keep" else "nothing") / 4
    assert counted == expected


def test_sums_in_fp32_are_an_exchange_a_kernel_and_buffers_as_long_as_the_messages():
    """A rank sends as much; two levels exchange in the group for each micro-batch, and between groups once."""
    options = "--zero.stage=2", "--parallel.shard_size=2", "--zero.optimizer_over=all", "--dry_run.world_size=8"
    rounded, exact = (dry_run(shallow(*options, f"--zero.sum_over_ranks={sums}")) for sums in ("message", "fp32"))
    of_gradients = [event for event in rounded.events if event.op == "reduce_scatter"]
    exchanges = [event for event in exact.events if event.op == "all_to_all"]
    assert [(e.axis, e.wire_bytes) for e in exchanges] == [(e.axis, e.wire_bytes) for e in of_gradients]
    assert {e.axis for e in exchanges} == {"shard", "replica"}
    num_sums = [sum(kernel.name == "add" for kernel in found.kernels) for found in (rounded, exact)]  # of two terms
    assert num_sums[1] - num_sums[0] == len(exchanges)
    longest = {e.axis: e.message_bytes for e in sorted(of_gradients, key=lambda e: e.message_bytes)}
    buffers = [found.resident[DEVICE].get(TensorKind.BUFFERS, 0) for found in (rounded, exact)]
    assert buffers[1] - buffers[0] == sum(longest.values())


def test_a_dry_run_of_auto_has_the_memory_of_its_plan_and_not_that_of_the_steps_before():
    stage = "--zero.stage=2", "--activations.store=keep", "--zero.overlap_gather=true"
    chunks = "--offload.hidden_dim=64", "--offload.min_chunk_size_m=0.004", "--offload.search_range_m=0.004"

    def peaks(*options: str) -> list[int]:
        """Return the bytes on the device and on the host."""
        return [sum(dry_run(shallow(*stage, *options)).peak[where].values()) for where in (DEVICE, HOST)]

    most, least = peaks(), peaks("--offload.mode=host")
    budget = (least[0] + most[0]) / 2
    auto = "--offload.mode=auto", f"--offload.accelerator_memory_gb={budget / 1e9}"
    some = peaks(*auto, *chunks)
    assert least[0] < some[0] <= budget < most[0]
    assert most[1] < some[1] < least[1]


def test_a_host_update_is_copied_back_when_it_is_done_and_gathered_after_the_copy():
    host_rate = DGX_2.host_memory_rate_of_a_gpu * 1e9
    half, up, down = torch.float16, {"is_transfer": True}, {"is_transfer": True, "to_host": True}
    kernels = [
        Kernel("copy_", "backward", int(2 * 15.75e9), half, **down),  # one second
        Kernel("_fused_adamw_", "update", int(3 * host_rate), half, is_on_host=True),
        Kernel("copy_", "update", int(2 * 15.75e9), half, **up),
        memory_bound(1.0),
    ]
    gather = event("all_gather", "data", 16, 1000, launched=3, awaited=4)
    timeline = project(kernels, [gather], DGX_2, SHAPE)
    spans = {task.name if task.lane != "from host" else "copy back": task for task in timeline.tasks}
    assert spans["_fused_adamw_"].start == pytest.approx(1.0, rel=1e-6)
    assert spans["copy back"].start == pytest.approx(4.0, rel=1e-6)
    assert spans["all_gather"].start == pytest.approx(5.0, rel=1e-6)
    assert spans["add"].start < 1.0, "the accelerator does not wait for a copy that it does not read"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpu_memory_gib: -1", r"gpu_memory_gib=-1 .* above 0 and of at most 1e\+09"),
        ("peak_half_tflops: fast", "peak_half_tflops=fast"),
        ("gpus_per_nodes: 16", "gpus_per_nodes, which is unknown"),
        ("host_memory_gb: null", "host_memory_gb"),
        ("collective_multiprocessors: 80", "collective_multiprocessors=80 leaves kernels none"),
    ],
)
def test_a_cluster_file_with_a_mistake_is_refused(tmp_path, change, message):
    lines = (ROOT / "configs/clusters/dgx-2.yaml").read_text().splitlines()
    field = change.partition(":")[0]
    (tmp_path / "c.yaml").write_text("\n".join([*(line for line in lines if not line.startswith(f"{field}:")), change]))
    with pytest.raises(ConfigError, match=message):
        ClusterSpec.load(tmp_path / "c.yaml")


def test_a_blank_batch_of_documents_has_one_document_in_each_sample():
    train = TrainSettings(micro_batch_size=3, global_batch_size=6)
    samples = np.zeros((3, 3, 5), dtype=np.int64)
    samples[:, 2] = range(5)
    expected = DocumentBatch.of(samples)
    batches = blank_micro_batches(train, 5, num_batch_ranks=1, masks_documents=True)
    assert len(batches) == 2
    for batch in batches:
        assert isinstance(batch, DocumentBatch)
        for field in dataclasses.fields(expected):
            torch.testing.assert_close(getattr(batch, field.name), getattr(expected, field.name))
