"""The memory and the time that closed forms predict for a layout, by the bytes that are held and moved."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpt.builder.activation_store import block_sum_bytes
from gpt.builder.closed_forms import parameters_of_rank
from gpt.builder.train_state import blocks_on, build_mesh
from gpt.settings.parser import parse_settings
from gpt.shape.flops import hardware_flops
from lab.dryrun.dry_run import DEVICE, dry_run
from lab.measure.cluster import ClusterSpec
from lab.planner.layouts import (
    ASSUMED_PEAK_FRACTION,
    MAX_MICRO_BATCH,
    CandidateLayout,
    candidate_layouts,
    fits,
    model_states,
    offload_seconds,
    planned_workload,
    predict,
    step_seconds,
)
from lab.planner.search import Search
from parallel.memory_kinds import TensorKind
from parallel.world import imitated_world
from zero.formulas.memory import ModelStates

ROOT = Path(__file__).resolve().parents[4]
# 10e9 bytes per second over PCIe, and 100e9 in the host's memory for each of 2 GPUs.
CLUSTER = replace(
    ClusterSpec.load(ROOT / "configs/clusters/dgx-2.yaml"),
    host_gb_per_second=10.0,
    host_memory_gb_per_second=200.0,
    gpus_per_node=2,
)

TINY = ["--model.num_layers=4", "--model.hidden_size=64", "--model.num_heads=4", "--model.seq_length=32"]
TINY += ["--model.vocab_size=128", "--data.path=unread"]


@pytest.mark.parametrize(
    "options",
    [
        ["--parallel.context_size=2"],  # tensor ranks may have one head
        ["--parallel.sequence_parallel=true"],  # no two ranks hold the same activations
        ["--train.reproducible=layout", "--train.reproducible_blocks=2", "--train.eval_samples=0"],
    ],
)
def test_every_predicted_layout_is_one_that_a_run_accepts(options: list[str]):
    chosen = parse_settings([*TINY, "--train.global_batch_size=16", "--train.micro_batch_size=1", *options])
    layouts = candidate_layouts(8, chosen, ["train.micro_batch_size"])
    found = [layout for layout in layouts if predict(layout, chosen, CLUSTER, 8)]
    assert found
    for layout in found:
        with imitated_world(0, 8, 8, "nccl") as world:
            build_mesh(layout.applied_to(chosen), world)


@pytest.mark.parametrize(
    ("on_host", "num_micro_batches", "seconds"),
    [
        # Gradients to the host and updated parameters, half as large as the master weights, back.
        (ModelStates(parameters=0, gradients=20e9, master=40e9, moments=80e9), 1, (20 + 20) / 10 + (240 + 20) / 100),
        # Two sums of gradients are copied back, so that the next micro-batch's are added to them.
        (ModelStates(parameters=0, gradients=20e9, master=40e9, moments=80e9), 3, (100 + 20) / 10 + (240 + 20) / 100),
        # Parameters are copied for each forward and each backward.
        (ModelStates(parameters=20e9, gradients=20e9, master=40e9, moments=80e9), 3, (100 + 120) / 10 + 260 / 100),
        (ModelStates(parameters=20e9, gradients=0, master=0, moments=0), 1, 4.0),
        (ModelStates(parameters=0, gradients=0, master=0, moments=0), 5, 0.0),
    ],
)
def test_offloaded_states_take_the_time_of_their_copies_and_of_the_update_on_the_host(
    on_host: ModelStates, num_micro_batches: int, seconds: float
):
    assert offload_seconds(on_host, 2, num_micro_batches, CLUSTER) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("stage", "num_layers_unsharded"), [(2, 0), (3, 3)])
def test_a_layout_holds_its_states_three_buckets_and_at_stage_3_three_layers(stage: int, num_layers_unsharded: int):
    settings = parse_settings([*TINY, "--zero.bucket_numel=5000"])
    layout = CandidateLayout(1, stage, "keep", micro_batch_size=4)
    settings = layout.applied_to(settings).with_gradient_types(2)
    work = planned_workload(settings, data_size=2)
    states = model_states(settings, 2).accelerator.total
    unsharded = num_layers_unsharded * 2 * parameters_of_rank(settings.model, 1) / 4
    assert work.state_bytes == states + 3 * 5000 * 2 + unsharded  # in bf16


def test_traffic_of_the_data_axis_costs_what_exceeds_the_computation_beside_it():
    given = "--zero.stage=3", "--activations.store=none", "--train.micro_batch_size=4", "--train.global_batch_size=32"
    settings = parse_settings([*TINY, *given, "--zero.overlap=true"]).with_gradient_types(8)
    alone = replace(settings, zero=replace(settings.zero, overlap=False, overlap_gather=False))
    work = planned_workload(settings, data_size=8)
    computing = hardware_flops(settings.model, 4, "nothing") / (CLUSTER.peak_half_tflops * ASSUMED_PEAK_FRACTION * 1e12)
    for gigabytes in (work.data_bytes / computing / 4e9, work.data_bytes / computing / 0.25e9):
        cluster = replace(CLUSTER, node_gb_per_second=gigabytes, network_card_gb_per_second=gigabytes)
        cluster = replace(cluster, node_fraction=1.0, intra_node_gb_per_second=1e9)  # the slower link counts
        sending = work.data_bytes / (gigabytes * 1e9)
        assert sending == pytest.approx(4 * computing) or sending == pytest.approx(computing / 4)
        after, beside = computing + sending, max(computing, sending)
        assert step_seconds(work, settings, cluster, 8) == pytest.approx((after, beside), rel=1e-12)
        assert step_seconds(work, alone, cluster, 8) == pytest.approx((after, after), rel=1e-12)
    fast = replace(cluster, gpus_per_node=8, intra_node_gb_per_second=1e9)
    assert step_seconds(work, alone, fast, 8)[0] == pytest.approx(computing, rel=1e-3), "inside a node"


def test_two_levels_are_chosen_where_groups_do_not_fit_and_the_network_is_slow():
    """30B parameters, 64 nodes of 8 GPUs that share a card of 25 GB/s, 8 micro-batches of one sequence."""
    cluster = ClusterSpec.load(ROOT / "configs/clusters/hgx-h100-ethernet.yaml")
    given = "--parallel.sequence_parallel=false", "--train.global_batch_size=4096"
    settings = parse_settings([f"--config={ROOT}/configs/gpt/30b.yaml", "--parallel.tensor_size=1", *given])
    flat = CandidateLayout(1, 3, "none", micro_batch_size=1)
    groups, two_levels = (replace(flat, shard_size=8, optimizer_over=over) for over in ("group", "all"))
    found = {one: predict(one, settings, cluster, 512) for one in (flat, groups, two_levels)}
    assert [fits(one, cluster) for one in found.values()] == [True, False, True]

    numel, inside, card = parameters_of_rank(settings.model, 1), 370e9, 25e9  # bytes per second
    more = numel * 6 * (1 / 8 - 1 / 512), numel * 12 * (1 / 8 - 1 / 512)
    assert found[two_levels].device_bytes - found[flat].device_bytes == pytest.approx(more[0])
    assert found[groups].device_bytes - found[two_levels].device_bytes == pytest.approx(more[1])
    sending, between = 3 * 2 * numel * 7 / 8 / inside, 2 * 2 * numel / 8 * 63 / 64 / (card / 8)
    of_flat = 8 * 3 * 2 * numel * 511 / 512 / card
    computing = (found[flat].seconds - of_flat) / 8  # a micro-batch, for longer than it sends inside the node
    assert found[flat].overlapped_seconds == pytest.approx(of_flat)
    assert found[two_levels].seconds == pytest.approx(8 * (computing + sending) + between)
    assert found[two_levels].overlapped_seconds == pytest.approx(7 * computing + sending + between)

    best = Search(settings, cluster, 512).plan().fitting[0].layout
    assert best.optimizer_over == "all"
    assert best.tensor_size * best.shard_size == 8
    applied = best.applied_to(settings)
    assert (applied.parallel.shard_size, applied.zero.optimizer_over) == (best.shard_size, "all")
    assert CandidateLayout.of(applied) == best


def test_micro_batches_of_all_sizes_that_divide_the_batch_are_considered_up_to_the_largest():
    for batch, expected in ((480, {1, 6, 10, 15, 30, 120}), (MAX_MICRO_BATCH * (MAX_MICRO_BATCH + 1), {1})):
        settings = parse_settings([*TINY, f"--train.global_batch_size={batch}"])
        sizes = {layout.micro_batch_size for layout in candidate_layouts(8, settings)}
        assert expected <= sizes
        assert all(batch % size == 0 for size in sizes)
    assert max(sizes) == MAX_MICRO_BATCH


def test_audits_take_the_time_of_a_micro_batch_in_some_steps_and_leaves_go_to_all_ranks_of_other_nodes():
    cluster, layout = ClusterSpec.load(ROOT / "configs/clusters/dgx-h100.yaml"), "--train.reproducible=layout"
    stage_2, found = CandidateLayout(1, 2, "none", micro_batch_size=2), list[float]()
    for options in ([], [layout], [layout, "--guard.audit_every=5"]):
        settings = parse_settings([*TINY, "--train.global_batch_size=128", *options])
        prediction = predict(stage_2, settings, cluster, 16)
        assert prediction is not None
        found.append(prediction.seconds)
    of_ring, without, with_audits = found
    assert with_audits == pytest.approx(without * (1 + 1 / (4 * 5)))  # of 4 micro-batches in every fifth step
    assert without > of_ring


IN_FP32 = "--zero.sum_over_ranks=fp32 --zero.reduce_dtype=bf16"
LAYOUT = "--train.reproducible=layout --train.reproducible_blocks"


@pytest.mark.parametrize(
    ("stage", "shard_size", "over", "overlap", "option"),
    [
        (3, 2, "all", True, IN_FP32),
        pytest.param(0, None, "group", True, IN_FP32, marks=pytest.mark.full),
        (3, 2, "all", True, f"{LAYOUT}=8"),  # 2 blocks for each group
        pytest.param(2, None, "group", False, f"{LAYOUT}=2", marks=pytest.mark.full),
        (1, None, "group", True, f"{LAYOUT}=32"),  # 4 for each rank
    ],
)
def test_closed_forms_and_dry_runs_agree_on_what_other_sums_hold(stage, shard_size, over, overlap, option):
    """They hold buffers, and sums of blocks of micro-batches."""
    given = "--model.num_layers=2", "--train.micro_batch_size=2", "--train.global_batch_size=64"
    zero = f"--zero.stage={stage}", f"--zero.optimizer_over={over}", f"--zero.overlap={overlap}"
    others = "--zero.bucket_numel=8192", "--zero.defragment=true", "--zero.alignment=256"
    ranks = "--dry_run.world_size=8", f"--parallel.shard_size={shard_size or 'null'}"
    dry, planned, most = list[float](), list[float](), list[float]()
    for options in ([word for word in option.split() if "reduce_dtype" in word], option.split()):
        settings = parse_settings([*TINY, *given, *zero, *others, *ranks, *options])
        found = dry_run(settings)
        dry.append(found.resident[DEVICE].get(TensorKind.BUFFERS, 0))
        planned.append(planned_workload(settings, data_size=8).state_bytes - block_sum_bytes(settings, 8))
        most.append(max(held[TensorKind.GRADIENTS] for _, held in found.memory.states()))
    assert dry[1] - dry[0] == planned[1] - planned[0] > 0
    numel = sum(flat.layout.numel for flat in found.state.model.flats)
    sums = blocks_on(settings, found.state.mesh.data).kept_bytes(4 * numel)
    assert most[1] - most[0] == sums
    assert (sums > 0) == (LAYOUT in option)
