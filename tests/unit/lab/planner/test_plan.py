"""The planner: closed forms of layouts, the choice among them, and what it prints."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from gpt.builder.activation_store import workload
from gpt.settings.option_names import messages_in_option_names
from lab.acceptance.cases import covering
from lab.dryrun.dry_run import DEVICE, dry_run
from lab.measure.cluster import ClusterSpec
from lab.planner import depth
from lab.planner.depth import Estimate, ShallowRun, shallow_runs
from lab.planner.layouts import FIELDS, CandidateLayout, Prediction, Store, activation_bytes, candidate_layouts, predict
from lab.planner.nearest import nearest_lines, published_rows
from lab.planner.plan import check_rates, constraints, main, with_tokens
from lab.planner.plan_report import chosen_lines, constraint_lines
from lab.planner.remedies import remedies
from lab.planner.search import Plan, Search, closed_form_rank
from parallel.validation.errors import ConfigError
from parallel.validation.fields import shown
from tests.unit.lab.dryrun.test_projection import DGX_2, ROOT, settings, shallow
from zero.core.partition.stage import STAGES


def search(*options: str, world_size: int = 400, cluster: ClusterSpec = DGX_2, **changes: Any) -> Search:
    return Search(settings(*options), cluster, world_size, **changes)


def test_the_planner_chooses_a_layout_that_fits():
    plan = search().plan()
    assert plan.fitting == sorted(plan.fitting, key=closed_form_rank)
    assert all(found.device_bytes <= DGX_2.gpu_memory_bytes - 1e9 for found in plan.fitting)
    assert {(f.layout.tensor_size, f.layout.stage) for f in plan.too_large} >= {(16, 0), (8, 1)}
    assert any(f.layout.stage == 3 for f in plan.fitting)


def test_the_largest_model_fits_and_one_more_layer_does_not():
    given = "--parallel.tensor_size=16", "--activations.store=keep"
    of_16 = search(*given, fixed=("parallel.tensor_size", "activations.store"))
    num_layers, layout = of_16.deepest_models()[0]
    deepest = of_16.with_depth(num_layers)
    assert deepest.predict(layout) in deepest.plan().fitting
    with pytest.raises(ConfigError, match=r"does not fit on 400 GPUs: .* needs [\d.]+ GB"):
        of_16.with_depth(num_layers + 1).plan()


def test_offload_fits_a_model_whose_states_exceed_the_device():
    """13B parameters on one node: 16 GB of states per GPU; with offload, stage 2 keeps 2 bytes per parameter there."""
    small = "--model.num_layers=40", "--model.hidden_size=5120", "--train.global_batch_size=64"
    either = search(*small, "--offload.mode=auto", world_size=16)
    plan = either.plan()
    offloaded = [found for found in plan.fitting if found.layout.offload == "host"]
    for found in offloaded:
        without = either.predict(dataclasses.replace(found.layout, offload="accelerator"))
        assert found.device_bytes < without.device_bytes
        assert found.host_bytes > without.host_bytes
        assert found.seconds > without.seconds
    in_stage_2 = {f.layout.offload for f in plan.fitting if (f.layout.tensor_size, f.layout.stage) == (1, 2)}
    assert in_stage_2 == {"host"}
    assert not any(found.layout.offload == "host" for found in search(*small, world_size=16).plan().fitting)


def test_a_world_that_no_layout_divides_is_refused():
    with pytest.raises(ConfigError, match=r"no layout divides train.global_batch_size=800 sequences over 448 ranks"):
        search(world_size=448).plan()


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("none", ["--model.attention=flash", "--model.dropout=0"]),
        ("none", ["--model.attention=math", "--model.dropout=0.1"]),
        ("selective", ["--model.attention=math", "--model.dropout=0.1", "--parallel.sequence_parallel=true"]),
        ("none", ["--config=configs/models/llama.yaml", "--model.attention=flash", "--model.num_kv_heads=2"]),
        ("none", ["--config=configs/models/qwen3.yaml", "--model.attention=flash", "--model.head_dim=32"]),
    ],
)
def test_a_layer_without_checkpoints_keeps_the_bytes_of_the_closed_form(store: str, options: list[str]):
    def at_depth(num_layers: int) -> tuple[float, float]:
        wide = "--model.hidden_size=256", "--model.num_heads=4", "--model.seq_length=128"
        depth = f"--model.num_layers={num_layers}", f"--activations.store={store}", "--zero.stage=0"
        chosen = shallow(*depth, *wide, *options).with_gradient_types(2)
        formula = activation_bytes(workload(chosen, 2, chosen.parallel.tensor_size), chosen)
        recording = dry_run(chosen)
        peak, resident = (sum(memory[DEVICE].values()) for memory in (recording.peak, recording.resident))
        return 2 * formula, peak - resident

    shallower, deeper = at_depth(2), at_depth(4)
    formula, measured = (b - a for a, b in zip(shallower, deeper, strict=True))
    assert measured == pytest.approx(formula, rel=0.01), "the statistics of norms are left out"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_documents_kept_apart_take_a_mask_if_the_kernel_does_not_suit(precision: str):
    def bytes_with(masks_documents: str) -> tuple[float, float]:
        shape = "--model.num_layers=2", "--model.hidden_size=64", "--model.num_heads=4", "--model.seq_length=256"
        chosen = shallow(
            *shape,
            *("--model.attention=flash", "--model.dropout=0", "--activations.store=none"),
            f"--train.precision={precision}",
            f"--data.mask_documents={masks_documents}",
        ).with_gradient_types(2)
        formula = activation_bytes(workload(chosen, 2, chosen.parallel.tensor_size), chosen)
        return 2 * formula, sum(dry_run(chosen).peak[DEVICE].values())

    formula, measured = (b - a for a, b in zip(bytes_with("false"), bytes_with("true"), strict=True))
    assert formula == (2 * 256**2 * 4 if precision == "fp32" else 0)
    assert measured == pytest.approx(formula, rel=0.02, abs=2 * 8 * 2 * 256), "tokens are not copied"


def test_every_store_and_local_accumulation_is_considered():
    layouts = list(candidate_layouts(8, settings("--train.global_batch_size=64")))
    assert {layout.store for layout in layouts} == {"none", "selective", "keep", "partition", "partition_host"}
    assert {layout.stage for layout in layouts if layout.accumulate == "local"} == {3}
    stage_1 = CandidateLayout(tensor_size=16, stage=1, store="keep", micro_batch_size=8)
    local = dataclasses.replace(stage_1, stage=2, accumulate="local")
    one, other = (predict(layout, settings(), DGX_2, 400) for layout in (stage_1, local))
    assert (one.device_bytes, one.seconds) == (other.device_bytes, other.seconds), "so it is left out in stage 2"
    assert local.applied_to(settings()).zero.accumulate == "local"


@pytest.mark.parametrize(
    ("stage", "accumulate", "tensor_size"),
    [
        pytest.param(1, "reduce", 2, marks=pytest.mark.full),
        pytest.param(3, "reduce", 1, marks=pytest.mark.full),
        (3, "local", 2),
    ],
)
def test_three_micro_batches_are_recorded_and_have_the_time_and_memory_of_seven(
    monkeypatch: pytest.MonkeyPatch, stage: int, accumulate: str, tensor_size: int
):
    monkeypatch.setattr(depth, "DEPTHS", (2, 2))
    world = "--train.micro_batch_size=1", f"--train.global_batch_size={28 // tensor_size}", "--activations.store=none"
    layout = f"--zero.stage={stage}", f"--zero.accumulate={accumulate}", f"--parallel.tensor_size={tensor_size}"
    chosen = shallow(*world, *layout)
    run, _ = shallow_runs(chosen)
    assert run.num_left_out == 4
    monkeypatch.setattr("lab.dryrun.dry_run.MAX_MICRO_BATCHES", 7)
    of_three, of_seven = depth.estimate(run, DGX_2), depth.estimate(ShallowRun.of(chosen, 0), DGX_2)
    assert of_three.seconds == pytest.approx(of_seven.seconds, rel=1e-9)
    tokens_and_losses = 4 * ((32 + 1) * 8 + 4)
    assert of_seven.device_peak_bytes - of_three.device_peak_bytes == tokens_and_losses


def prediction(store: str, seconds: float) -> Prediction:
    return Prediction(CandidateLayout(1, 2, store, 8), 20e9, 0.0, seconds, 4, seconds)


def estimate(seconds: float, gigabytes: float = 20.0, on_host: float = 0.0) -> Estimate:
    return Estimate(1e9, gigabytes * 1e9, on_host * 1e9, seconds)


PREDICTIONS = [prediction("none", 1.0), prediction("selective", 1.1), prediction("keep", 1.2), prediction("auto", 1.3)]


LAYOUTS = [
    CandidateLayout(1, 3, "none", 8),
    CandidateLayout(2, 1, "none", 8),
    CandidateLayout(1, 1, "none", 8),
    CandidateLayout(1, 1, "keep", 8),
    CandidateLayout(1, 1, "none", 8, offload="host"),
    CandidateLayout(1, 0, "none", 8),
]


@pytest.mark.parametrize(
    ("seconds", "gigabytes", "best", "num_tied"),
    [
        ([1.0, 1.06, 1.05, 1.08, 1.06, 1.2], [20, 12, 20, 30, 10, 30], 4, 5),
        ([1.0, 1.06, 1.08, 1.05, 1.06, 1.2], [20, 10, 30, 20, 10, 30], 1, 5),  # one divided state, and none offloaded
        ([1.0, 1.2, 1.2, 1.2, 1.2, 1.05], [20, 10, 20, 20, 10, 30], 0, 2),  # simpler, with less room
        ([1.0, 1.2, 1.2, 1.2, 1.2, 1.05], [20, 10, 20, 20, 10, 20.03], 5, 2),
        ([1.0, 1.2, 1.2, 1.2, 1.2, 1.2], [20, 10, 20, 20, 10, 10], 0, 1),
    ],
)
def test_of_layouts_within_the_error_the_one_with_most_room_wins(seconds, gigabytes, best, num_tied):
    estimates = {one: estimate(s, gb) for one, s, gb in zip(LAYOUTS, seconds, gigabytes, strict=True)}
    of_ten_percent = search(cluster=dataclasses.replace(DGX_2, median_error=0.1))
    chosen, tied = of_ten_percent.choose(estimates)
    assert (chosen, len(tied)) == (LAYOUTS[best], num_tied)
    printed = " ".join(chosen_lines(estimates, of_ten_percent))
    assert ("a tie" in printed) == (num_tied > 1)


def test_products_in_fp8_need_a_cluster_file_with_their_rates():
    h100 = ROOT / "configs/clusters/dgx-h100.yaml"
    fp8 = settings("--train.matmul=fp8", "--train.precision=bf16")
    with pytest.raises(ConfigError, match=r"dgx-h100.yaml has no peak_fp8_tflops, .* choose .*/hgx-h100.yaml"):
        check_rates(fp8, ClusterSpec.load(h100), h100)
    check_rates(fp8, ClusterSpec.load(h100.with_name("hgx-h100.yaml")), h100)
    check_rates(settings(), ClusterSpec.load(h100), h100)


def test_a_plan_shows_the_nearest_rows_on_its_gpus_and_what_none_of_them_has():
    h100 = ClusterSpec.load(ROOT / "configs/clusters/dgx-h100.yaml")
    shape = "--model.num_layers=24", "--model.hidden_size=2048", "--model.num_heads=16"
    found = list(nearest_lines(settings(*shape, "--model.seq_length=2048"), h100, 8))
    assert found[1].startswith("  MosaicML_H100-24x2048-n8-s2048-b")
    assert len(found) == 4
    longest = max(int(row["seq"]) for row in published_rows() if row["gpu"] == "H100")
    (last,) = list(nearest_lines(settings(*shape, f"--model.seq_length={2 * longest}"), h100, 8))[4:]
    assert last == f"  none has more than {longest} tokens: the error at model.seq_length={2 * longest} is unknown"
    (only,) = nearest_lines(settings(), dataclasses.replace(h100, peak_half_tflops=1.0), 8)
    assert only.startswith("no published row is on GPUs of dgx-h100")


SMALL = "--model.num_layers=8", "--model.hidden_size=1024", "--model.num_heads=16"
VALUES = {
    "parallel.tensor_size": (1, 2, 3),
    "parallel.shard_size": (None, 4),
    "zero.stage": tuple(STAGES),
    "zero.optimizer_over": ("group", "all"),
    "zero.accumulate": ("reduce", "local"),
    "activations.store": get_args(Store),
    "offload.mode": ("accelerator", "host"),
    "train.micro_batch_size": (1, 7, 25),
}


def test_every_constraint_of_a_covering_sample_is_kept_or_refused_by_name():
    outcomes = Counter[str]()
    for constraint in covering(VALUES, 2):
        options = (f"--{name}={shown(value)}" for name, value in constraint.items())
        message = ""
        try:
            with messages_in_option_names():
                plan = search(*SMALL, *options, world_size=32, fixed=tuple(constraint)).plan()
        except ConfigError as refusal:
            message = str(refusal)
        if message:
            assert any(name in message for name in constraint), message
        else:
            (found,) = plan.fitting
            assert {name: getattr(found.layout, field) for name, field in FIELDS.items()} == constraint
        outcomes["refused" if message else "kept"] += 1
    assert min(outcomes["kept"], outcomes["refused"]) >= 5


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"parallel.tensor_size": 3}, r"parallel.tensor_size=3 cannot be kept on 400 GPUs .*; choose 1, 2, 4, 8, 16"),
        ({"train.micro_batch_size": 7}, r"micro_batch_size=7 cannot be kept on .*global_batch_size=800; choose 1, 2"),
        ({"parallel.shard_size": 16, "parallel.tensor_size": 16}, r"shard_size=16 cannot be kept .*choose null"),
        ({"parallel.tensor_size": 3, "train.micro_batch_size": 7}, r"no layout .* with parallel.tensor_size=3, train"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_name(constraint: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        search(*(f"--{name}={value}" for name, value in constraint.items()), fixed=tuple(constraint)).plan()


def test_what_is_given_is_fixed_unless_it_is_freed_or_auto(tmp_path: Path):
    file = tmp_path / "given.yaml"
    file.write_text("zero:\n  stage: 1\nactivations:\n  store: auto\n")
    given = ["--config", str(file), "--parallel.tensor_size=2"]
    found = constraints(given, 32, None)
    assert found == {"parallel.tensor_size": "command line", "zero.stage": f"{file}, line 2"}
    assert list(constraints(given, 32, ["zero.stage"])) == ["parallel.tensor_size"]
    assert constraints(given, 32, []) == {"parallel.tensor_size": "command line"}, "an option stays"
    with pytest.raises(ConfigError, match=r"--free=zero.overlap is no setting of the layout; choose parallel"):
        constraints(given, 32, ["zero.overlap"])
    chosen = settings("--zero.stage=1", "--parallel.tensor_size=2")
    lines = list(constraint_lines(chosen, found))
    assert lines[1] == f"fixed: zero.stage=1 ({file}, line 2; --free zero.stage searches it)"
    assert lines[-1].startswith(
        "searched: parallel.shard_size, zero.optimizer_over, zero.accumulate, activations.store"
    )


def test_what_makes_a_layout_fit_is_found_by_trying():
    """13B parameters on one node: stage 1 has 4 + 12 / 16 bytes of them."""
    layout = CandidateLayout(1, 1, "keep", 1)
    shape = "--model.num_layers=40", "--model.hidden_size=5120", "--train.global_batch_size=64"
    chosen = settings(*shape)
    found = remedies(layout, Search(chosen, DGX_2, 16))
    assert [str(one) for one in found] == ["--parallel.tensor_size=4", "--zero.stage=3"]
    deep = settings(*shape, "--model.num_layers=200")
    pairs = [str(one) for one in remedies(layout, Search(deep, DGX_2, 16))]
    assert "--offload.mode=auto --zero.stage=3" in pairs


@pytest.mark.parametrize(("text", "steps"), [("819.2K", 1), ("819201", 2), ("1.6384M", 2)])
def test_a_length_in_tokens_is_a_number_of_steps(text: str, steps: int):
    assert with_tokens(settings(), text).train.steps == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("many", "--tokens=many is no number of tokens"),
        ("3MB", "--tokens=3MB is no number of tokens"),
        ("nan", "a run of nan tokens"),
        ("1e400", "a run of inf tokens"),
        ("-5", "a run of -5 tokens"),
    ],
)
def test_what_is_no_length_of_a_run_is_refused(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        with_tokens(settings(), text)


def test_layouts_are_verified_until_enough_fit_and_each_is_announced(monkeypatch, capsys):
    estimates = {"none": estimate(2.0, gigabytes=33.5), "selective": estimate(1.9, on_host=200), "keep": estimate(1.8)}
    monkeypatch.setattr(Search, "estimate", lambda _search, layout: estimates[layout.store])
    verified = search(num_to_verify=2).verify(Plan(PREDICTIONS, []))
    assert [layout.store for layout in verified] == ["none", "selective", "keep"], "the last has keep's partition"
    announced = capsys.readouterr().err.splitlines()
    assert announced[0] == "dry run 1: tensor 1, stage 2, none, micro-batch 8"
    assert len(announced) == 3


def test_the_fastest_are_verified_whether_or_not_computation_hides_traffic(monkeypatch):
    """The first layout sends little and recomputes, the second sends much beside its computation."""
    monkeypatch.setattr(Search, "estimate", lambda _search, _layout: estimate(1.8))
    sends_little = Prediction(CandidateLayout(1, 3, "keep", 8), 20e9, 0.0, 2.0, 1, overlapped_seconds=1.9)
    sends_much = Prediction(CandidateLayout(1, 3, "none", 1), 20e9, 0.0, 3.0, 8, overlapped_seconds=1.5)
    slower = Prediction(CandidateLayout(1, 2, "none", 1), 20e9, 0.0, 4.0, 8, overlapped_seconds=3.0)
    wider = Prediction(CandidateLayout(2, 2, "none", 1), 20e9, 0.0, 5.0, 8, overlapped_seconds=4.0)
    verified = search(num_to_verify=1).verify(Plan([sends_little, sends_much, slower, wider], []))
    assert list(verified) == [sends_little.layout, wider.layout, sends_much.layout], "and one of each tensor size"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], r"--nodes=0 or --verify=.* is below 1; choose 1 or more"),
        (["--nodes", "2", "0", "--front=plot.png"], r"--nodes=0 or --verify=3 is below 1; choose 1 or more"),
        (["--nodes", "2", "--verify", "0"], r"--nodes=2 or --verify=0 is below 1; choose 1 or more"),
        (["--nodes", "1", "2"], r"--nodes=\[1, 2\] are 2 numbers, which only --front=PLOT compares"),
    ],
)
def test_numbers_of_nodes_that_cannot_be_planned_for_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        main(["--cluster", str(ROOT / "configs/clusters/dgx-2.yaml"), *arguments])
