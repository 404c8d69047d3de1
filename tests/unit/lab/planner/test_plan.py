"""The planner: closed forms of layouts, the choice among them, and what it prints."""

import dataclasses

import pytest
from rich.console import Console
from rich.table import Table

from gpt.builder.activation_store import workload
from lab.dryrun.dry_run import DEVICE, dry_run
from lab.planner import depth
from lab.planner.closed_forms import Plan, closed_form_rank, deepest_models, make_plan
from lab.planner.depth import Estimate, ShallowRun, shallow_runs
from lab.planner.layouts import CandidateLayout, Prediction, activation_bytes, candidate_layouts, predict
from lab.planner.plan import main, verify
from lab.planner.plan_report import in_order, overridden, plan_table
from parallel.errors import ConfigError
from tests.unit.lab.dryrun.test_projection import DGX_2, ROOT, settings, shallow

NOT_CALIBRATED = dataclasses.replace(DGX_2, calibrated=False)


def test_the_planner_chooses_a_layout_that_fits():
    plan = make_plan(settings(), DGX_2, 400)
    assert plan.fitting == sorted(plan.fitting, key=closed_form_rank)
    assert all(found.device_bytes <= DGX_2.gpu_memory_bytes - 1e9 for found in plan.fitting)
    assert {(f.layout.tensor_size, f.layout.stage) for f in plan.too_large} >= {(16, 0), (8, 1)}
    assert any(f.layout.stage == 3 for f in plan.fitting)


def test_the_largest_model_fits_and_one_more_layer_does_not():
    num_layers, layout = deepest_models(settings(), DGX_2, 400)[0]
    deepest, deeper = (settings(f"--model.num_layers={num_layers + more}") for more in (0, 1))
    assert predict(layout, deepest, DGX_2, 400) in make_plan(deepest, DGX_2, 400).fitting
    with pytest.raises(ConfigError, match=r"does not fit on 400 GPUs: .* needs [\d.]+ GB"):
        make_plan(deeper, DGX_2, 400)


def test_offload_fits_a_model_whose_states_exceed_the_device():
    """13B parameters on one node: 16 GB of states per GPU; with offload, stage 2 keeps 2 bytes per parameter there."""
    small = "--model.num_layers=40", "--model.hidden_size=5120", "--train.global_batch_size=64"
    chosen = settings(*small, "--offload.mode=auto")
    plan = make_plan(chosen, DGX_2, 16)
    offloaded = [found for found in plan.fitting if found.layout.offload == "host"]
    for found in offloaded:
        without = predict(dataclasses.replace(found.layout, offload="accelerator"), chosen, DGX_2, 16)
        assert found.device_bytes < without.device_bytes
        assert found.host_bytes > without.host_bytes
        assert found.seconds > without.seconds
    in_stage_2 = {f.layout.offload for f in plan.fitting if (f.layout.tensor_size, f.layout.stage) == (1, 2)}
    assert in_stage_2 == {"host"}
    assert not any(found.layout.offload == "host" for found in make_plan(settings(*small), DGX_2, 16).fitting)


def test_a_world_that_no_layout_divides_is_refused():
    with pytest.raises(ConfigError, match=r"no layout divides train.global_batch_size=800 sequences over 448 ranks"):
        make_plan(settings(), DGX_2, 448)


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("none", ["--model.attention=flash", "--model.dropout=0"]),
        ("none", ["--model.attention=math", "--model.dropout=0", "--parallel.tensor_size=1"]),
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
    layouts = list(candidate_layouts(8, 64, "accelerator"))
    assert {layout.store for layout in layouts} == {"none", "selective", "keep", "partition", "partition_host"}
    assert {layout.stage for layout in layouts if layout.accumulate == "local"} == {3}
    stage_1 = CandidateLayout(tensor_size=16, stage=1, store="keep", micro_batch_size=8)
    local = dataclasses.replace(stage_1, stage=2, accumulate="local")
    one, other = (predict(layout, settings(), DGX_2, 400) for layout in (stage_1, local))
    assert (one.device_bytes, one.seconds) == (other.device_bytes, other.seconds), "so it is left out in stage 2"
    assert "--zero.accumulate=local" in local.options(800)
    assert local.applied_to(settings()).zero.accumulate == "local"


@pytest.mark.parametrize(
    ("stage", "accumulate", "tensor_size"),
    [(1, "reduce", 2), pytest.param(3, "reduce", 1, marks=pytest.mark.full), (3, "local", 2)],
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
    of_three, of_seven = depth.estimate(run, DGX_2), depth.estimate(ShallowRun.of(chosen, 0), DGX_2)
    assert of_three.seconds == pytest.approx(of_seven.seconds, rel=1e-9)
    tokens_and_losses = 4 * ((32 + 1) * 8 + 4)
    assert of_seven.device_peak_bytes - of_three.device_peak_bytes == tokens_and_losses


def prediction(store: str, seconds: float) -> Prediction:
    return Prediction(CandidateLayout(1, 2, store, 8), 20e9, 0.0, seconds, 4, seconds)


def estimate(seconds: float, gigabytes: float = 20.0, on_host: float = 0.0) -> Estimate:
    return Estimate(1e9, gigabytes * 1e9, on_host * 1e9, seconds)


PREDICTIONS = [prediction("none", 1.0), prediction("selective", 1.1), prediction("keep", 1.2), prediction("auto", 1.3)]


def test_the_table_is_in_the_order_of_dry_runs_and_then_of_closed_forms():
    none, selective, keep, other = (found.layout for found in PREDICTIONS)
    verified = {none: estimate(1.5, gigabytes=33.5), selective: estimate(1.9), keep: estimate(1.8)}
    first, others = in_order(PREDICTIONS, verified, DGX_2)
    assert [found.layout for found in first] == [keep, selective, none], "none does not fit beside the reserve"
    assert [found.layout for found in others] == [other]
    table = plan_table(PREDICTIONS, verified, dict.fromkeys(verified, 50.0), DGX_2)
    assert list(table.columns[0].cells) == [layout.division for layout in (keep, selective, none, other)]
    closed_form = f"{PREDICTIONS[-1].device_bytes / 1e9:.1f}"
    assert list(table.columns[2].cells) == ["20.0", "20.0", "33.5\ntoo much", closed_form]


def num_columns(table: Table) -> int:
    """Return the length of the longest line of a table that has all the room it wants."""
    console = Console(width=200)
    with console.capture() as printed:
        console.print(table)
    return max(map(len, printed.get().splitlines()))


def test_the_table_of_the_longest_layout_has_80_columns():
    layout = CandidateLayout(16, 3, "partition_host", 64, offload="host", accumulate="local")
    assert layout.division.endswith("local, offload")
    found = dataclasses.replace(PREDICTIONS[0], layout=layout, num_micro_batches=1024)
    verified = {layout: estimate(161.0, gigabytes=133.5)}
    table = plan_table([found], verified, {layout: 1234.5}, NOT_CALIBRATED)
    assert num_columns(table) <= 80


def test_the_options_of_a_plan_replace_those_that_were_given():
    given = ["--config", "a.yaml", "--zero.stage=1", "--model.num_layers", "4", "--train.steps=7"]
    chosen = ["--zero.stage=3", "--model.num_layers=9"]
    assert overridden(given, chosen) == ["--config", "a.yaml", "--train.steps=7", *chosen]


def test_layouts_are_verified_until_enough_fit_and_each_is_announced(
    capsys: pytest.CaptureFixture[str],
):
    estimates = {"none": estimate(2.0, gigabytes=33.5), "selective": estimate(1.9, on_host=200), "keep": estimate(1.8)}

    verified = verify(Plan(PREDICTIONS, []), lambda layout: estimates[layout.store], DGX_2, 2)
    assert [layout.store for layout in verified] == ["none", "selective", "keep"], "the last has keep's partition"
    announced = capsys.readouterr().err.splitlines()
    assert announced[0] == "dry run 1: tensor 1, stage 2, none, micro-batch 8"
    assert len(announced) == 3


def test_the_fastest_are_verified_whether_or_not_computation_hides_traffic():
    """The first layout sends little and recomputes, the second sends much beside its computation."""
    sends_little = Prediction(CandidateLayout(1, 3, "keep", 8), 20e9, 0.0, 2.0, 1, overlapped_seconds=1.9)
    sends_much = Prediction(CandidateLayout(1, 3, "none", 1), 20e9, 0.0, 3.0, 8, overlapped_seconds=1.5)
    slower = Prediction(CandidateLayout(1, 2, "none", 1), 20e9, 0.0, 4.0, 8, overlapped_seconds=3.0)
    wider = Prediction(CandidateLayout(2, 2, "none", 1), 20e9, 0.0, 5.0, 8, overlapped_seconds=4.0)
    plan = Plan([sends_little, sends_much, slower, wider], [])
    verified = verify(plan, lambda _layout: estimate(1.8), DGX_2, 1)
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
