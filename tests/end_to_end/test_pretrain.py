"""Whole runs, from settings to metrics, plot, generated texts and checkpoints, and resumed from a checkpoint."""

import json
import math
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._python_dispatch import TorchDispatchMode

from gpt import trainer
from gpt.builder.train_state import build
from gpt.checkpoint.checkpoint import load
from gpt.evaluate import evaluate_model
from gpt.model.transformer import GPT
from gpt.monitor.console import RunConsole
from gpt.run_folder.files import read_steps
from gpt.settings.parser import parse_settings
from lab.dryrun.collectives import read_profile
from lab.dryrun.report import run_and_report
from parallel.mesh import Axis, Mesh
from parallel.tensor.token_layout import ReplicatedTokens
from parallel.validation.errors import ConfigError
from parallel.world import start_world
from pretrain_gpt import pretrain
from tests.end_to_end.runs import EVALUATED, options, run, run_on_rank
from tests.programs import ROOT
from tests.ranks import run_ranks
from tests.recordings import assert_figures_recorded
from zero import DistributedState

MEASURED = {"tokens_per_second", "model_tflops_per_device", "hardware_tflops_per_device"}
MEASURED |= {"peak_allocated_bytes", "peak_reserved_bytes", "reserved_unused_bytes", "allocation_retries"}
MEASURED |= {"seconds_per_step", "unix_time"}
LAYOUT = {"ranks", "zero_stage", "tensor_size", "context_size"}
PROMISED_KEYS = MEASURED | LAYOUT | {"step", "loss", "grad_norm", "lr", "tokens", "mfu", "skipped_steps"}
PROMISED_KEYS |= {"data_axis_bytes", "tensor_axis_bytes"}
THREE_A_CHECKPOINT = {"schedule__decay": "constant", "checkpoint__every": 3, "train__eval_every": 3} | EVALUATED


def reproducible(records: list[dict]) -> list[dict]:
    """Return the records without what is measured, traffic and memory included.

    The first step after every start of the program has other traffic and memory than later ones, which prefetch and
    place parameters as it has recorded.
    """
    left_out = MEASURED | LAYOUT | {"data_axis_bytes", "tensor_axis_bytes"}
    return [
        {k: v for k, v in record.items() if k not in left_out and not k.startswith("memory/")} for record in records
    ]


@pytest.fixture(scope="module")
def ended(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two ranks that has ended, which tests do not change."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    run(2, corpus, folder, checkpoint__weights=True, **THREE_A_CHECKPOINT)
    return folder


def test_a_run_leaves_its_settings_metrics_and_plot(corpus, ended):
    records = read_steps(ended)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record.keys() >= PROMISED_KEYS for record in records)
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 6]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["tokens"] == 6 * 8 * 16
    assert (ended / "loss.png").read_bytes().startswith(b"\x89PNG")
    given = parse_settings(options(corpus, ended, checkpoint__weights=True, **THREE_A_CHECKPOINT))
    assert parse_settings(["--config", str(ended / "config.yaml")]) == given


def test_texts_are_generated_on_the_way_and_change_no_loss(corpus, tmp_path):
    """At stage 3 all ranks generate together; dropout shows if a random number is drawn for it."""
    settings = {"zero__stage": 3, "model__dropout": 0.1, "train__steps": 4}
    plain = run(2, corpus, tmp_path / "plain", **settings)
    found = run(
        2, corpus, tmp_path / "run", train__sample_tokens=4, train__sample_every=2, train__log_every=3, **settings
    )
    assert {record["step"]: "samples" in record for record in found} == {1: False, 2: True, 3: False, 4: True}
    assert [record["loss"] for record in found] == [record["loss"] for record in plain]
    for sample in found[-1]["samples"]:
        assert "green bottles" in sample["prompt"]  # the beginning of a sequence of the validation split
        assert sample["text"].startswith(sample["prompt"])
    assert len(found[-1]["samples"]) == 3


def test_a_real_run_and_a_dry_one_have_the_same_profile_of_collectives(corpus, tmp_path):
    settings = {"zero__stage": 3, "activations__store": "keep"}
    run(2, corpus, tmp_path / "real", train__steps=5, **settings)
    dry = {"dry_run__world_size": 2, "dry_run__backend": "gloo"}
    run_and_report(parse_settings(options(corpus, tmp_path / "dry", **settings, **dry)), RunConsole(is_quiet=True))
    found = read_profile(tmp_path / "real")
    assert found == read_profile(tmp_path / "dry")
    assert (tmp_path / "dry/memory.png").exists()
    assert {row["op"] for row in found} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_every_layout_has_the_same_losses_and_they_are_as_recorded(corpus, tmp_path):
    """The order of samples does not depend on the ranks. Other tests show that no layout changes a step."""
    expected = run(1, corpus, tmp_path / "one", zero__stage=0, **EVALUATED)
    recorded = {"one": [same_everywhere(record) for record in expected]}
    for num_ranks, stage, tensor_size in ((2, 1, 2), (4, 2, 2), (2, 3, 1)):
        settings = {"zero__stage": stage, "parallel__tensor_size": tensor_size}
        settings |= {"parallel__sequence_parallel": stage == 2} | EVALUATED
        found = run(num_ranks, corpus, tmp_path / f"{num_ranks}-{stage}-{tensor_size}", **settings)
        assert all((record["tensor_axis_bytes"] > 0) == (tensor_size > 1) for record in found)
        for key in ("loss", "grad_norm"):
            assert [r[key] for r in found] == pytest.approx([r[key] for r in expected], rel=1e-4)
        recorded[f"{num_ranks} ranks, stage {stage}"] = [same_everywhere(record) for record in found]
    assert_figures_recorded("losses", recorded, rel=1e-3)


def same_everywhere(record: dict[str, Any]) -> dict[str, Any]:
    """Return what of a record is the same in all runs on any machine, up to rounding; generated texts are not."""
    return {key: value for key, value in record.items() if key not in MEASURED | LAYOUT | {"mfu", "samples"}}


@pytest.mark.parametrize(
    ("stage", "precision", "tensor_size", "offload", "last_step"),
    [(1, "fp32", 1, "host", 2), (2, "fp16", 2, "accelerator", 4), (3, "bf16", 1, "auto", 2)],
)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    corpus, tmp_path, stage, precision, tensor_size, offload, last_step
):
    settings = {
        "offload__mode": offload,
        "offload__accelerator_memory_gb": 1.0,
        "parallel__tensor_size": tensor_size,
        "parallel__sequence_parallel": tensor_size > 1,
        "zero__stage": stage,
        "train__precision": precision,
        "model__dropout": 0.1,
        "checkpoint__every": 2,
        "checkpoint__keep": 3,
        "train__loss_scale.growth_interval": 2,
    } | EVALUATED  # of the last update
    num_ranks = 2 * tensor_size
    undisturbed = run(num_ranks, corpus, tmp_path / "run", **settings)
    for later in range(last_step + 2, 8, 2):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{later:08d}")
    resumed = run(num_ranks, corpus, tmp_path / "run", **settings)
    # By repr, because the norm of an overflow is NaN.
    assert repr(reproducible(resumed)) == repr(reproducible(undisturbed))


def save_by_dcp(arguments: list[str], checkpoint: Path, folder: Path) -> None:
    settings = parse_settings(arguments)
    state = build(settings, Mesh.create(1), torch.device("cpu"))
    load(checkpoint, state)
    dcp.save({"app": DistributedState(state.model, state.optimizer)}, checkpoint_id=folder)


def test_a_run_that_resumes_from_a_dcp_folder_goes_on_in_the_same_order_of_samples(corpus, tmp_path, ended):
    checkpoint = ended / "checkpoints" / "step-00000003"
    run_ranks(2, save_by_dcp, options(corpus, ended), checkpoint, tmp_path / "dcp")
    found = run(4, corpus, tmp_path / "run", checkpoint__resume=tmp_path / "dcp", zero__stage=3, **THREE_A_CHECKPOINT)
    expected = read_steps(ended)[3:]
    assert [(record["step"], record["tokens"]) for record in found] == [(r["step"], r["tokens"]) for r in expected]
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in expected], rel=1e-6)


def test_a_run_starts_from_the_weights_that_another_has_left(corpus, tmp_path, ended):
    weights = ended / "weights" / "step-00000006"
    evaluated = {"train__initial_weights": weights, "train__steps": 1, "optimizer__lr": 0, "schedule__warmup_steps": 0}
    evaluated |= EVALUATED
    for num_ranks, stage, tensor_size in ((1, 0, 1), (4, 3, 2)):
        layout = {"zero__stage": stage, "parallel__tensor_size": tensor_size}
        (found,) = run(num_ranks, corpus, tmp_path / f"from-{stage}", **evaluated, **layout)
        assert found["validation_loss"] == pytest.approx(read_steps(ended)[-1]["validation_loss"], rel=1e-5)


def test_initial_weights_that_are_gone_are_not_missed_by_a_resume_or_an_evaluation(corpus, tmp_path, ended):
    weights = shutil.copytree(ended / "weights" / "step-00000006", tmp_path / "weights")
    settings = {"train__initial_weights": weights, "checkpoint__every": 1, "schedule__decay": "constant"}
    first = run(1, corpus, tmp_path / "run", **settings, train__steps=1)
    shutil.rmtree(weights)
    assert run(1, corpus, tmp_path / "run", **settings, train__steps=2)[:1] == first
    judged = ["--source", str(ROOT / "README.md"), *options(corpus, tmp_path / "run", **settings)]
    (found,) = run_ranks(1, evaluate_model, judged, init_process_group=False)
    assert math.isfinite(found.token_perplexity)


def test_a_finished_run_is_not_repeated_and_a_longer_one_continues_it(corpus, tmp_path, ended):
    first, folder = read_steps(ended), shutil.copytree(ended, tmp_path / "run")
    assert run(1, corpus, folder, **THREE_A_CHECKPOINT) == first
    longer = run(1, corpus, folder, **THREE_A_CHECKPOINT, train__steps=9)
    assert longer[:6] == first
    assert [record["step"] for record in longer] == list(range(1, 10))
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert kept == ["step-00000006", "step-00000009"]
    assert (folder / "config.1.yaml").exists()


def test_a_run_that_diverges_ends_like_any_other(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "mean_over", lambda mesh, loss: float("nan"))
    pretrain(parse_settings(options(corpus, tmp_path / "run")), start_world())
    assert all(math.isnan(record["loss"]) for record in read_steps(tmp_path / "run"))
    assert (tmp_path / "run" / "loss.png").exists()


def test_ramp_up_and_blending_run_through(corpus, tmp_path):
    settings = {"train__ramp_up": '{"start": 4, "increment": 4, "samples": 8}'}
    blend = f'["0.3:{corpus}", "0.7:{corpus}"]'
    records = run(1, corpus, tmp_path / "run", data__path=blend, **settings)
    assert [record["tokens"] // 16 for record in records] == [4, 8, 16, 24, 32, 40]


@pytest.mark.parametrize("name", ["c1", "c5", *(pytest.param(f"c{n}", marks=pytest.mark.full) for n in (2, 3, 4))])
def test_the_configurations_of_the_papers_table_3_train_alike(corpus, tmp_path, name):
    """C1 to C5 differ in where model states and activations are stored, not in what is computed."""
    shrunk = {"model__num_layers": 4, "train__steps": 2}
    expected = run(1, corpus, tmp_path / "plain", zero__stage=0, **shrunk)
    config = ["--config", str(ROOT / "configs" / "paper" / f"{name}.yaml")]
    arguments = config + options(corpus, tmp_path / name, parallel__tensor_size=2, **shrunk)
    records = run_ranks(4, run_on_rank, arguments, init_process_group=False)[0]
    assert [record["loss"] for record in records] == pytest.approx([r["loss"] for r in expected], rel=1e-4)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["hardware_tflops_per_device"] > records[-1]["model_tflops_per_device"], "they recompute"


def test_a_model_too_large_for_the_machine_leaves_a_record(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", model__hidden_size=1_000_000)
    with pytest.raises(ConfigError, match=r"rank 0 ran out of memory after step 0.*rank-0.txt says.*zero.stage=2"):
        pretrain(parse_settings(arguments), start_world())
    table = (tmp_path / "run" / "out_of_memory" / "rank-0.txt").read_text()
    assert "can't allocate memory" in table
    assert "peak allocated" in table
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert record["out_of_memory"] is True
    assert record["step"] == 0


class FailingOperation(TorchDispatchMode):
    """A mode in which a call of an operation finds no memory."""

    def __init__(self, operation: object, number: int):
        super().__init__()
        self._operation, self._number, self._num_calls = operation, number, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._num_calls += func is self._operation
        if func is self._operation and self._num_calls == self._number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


def table_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """The columns of each unit in the table of model states, in MB."""
    head, *rows = (run_dir / "out_of_memory" / "rank-0.txt").read_text().split("\n\n")[1].splitlines()
    columns = head.removeprefix("model states on the device").split()[:-1]
    return {row.rsplit(maxsplit=6)[0]: dict(zip(columns, map(float, row.split()[-6:]), strict=True)) for row in rows}


def test_running_out_of_memory_in_backward_leaves_a_table_of_what_holds_it(corpus, tmp_path):
    arguments = options(corpus, tmp_path / "run", zero__stage=3, train__compile="none")
    backward_of_norm = torch.ops.aten.native_layer_norm_backward.default
    settings = parse_settings(arguments)
    with FailingOperation(backward_of_norm, 45), pytest.raises(ConfigError, match="after step 2") as caught:
        pretrain(settings, start_world())
    assert str(tmp_path / "run" / "out_of_memory" / "rank-0.txt") in str(caught.value)
    table = table_of(tmp_path / "run")
    with torch.device("meta"):
        module = GPT(settings.model, ReplicatedTokens(Axis.trivial("tensor")))
    of_block = sum(param.nbytes for param in module.blocks[0].parameters()) / 1e6
    of_all = sum(param.nbytes for param in module.parameters()) / 1e6
    total = table.pop("all")
    assert set(table) == {"-", "blocks.0", "blocks.1"}
    for states, num_bytes in [(table["blocks.0"], of_block), (total, of_all)]:
        assert (states["parameters"], states["moments"]) == pytest.approx((num_bytes, 2 * num_bytes), abs=0.001)
    # The second block has run backward, and the first one runs.
    assert (table["blocks.0"]["unsharded"], table["blocks.1"]["unsharded"]) == pytest.approx((of_block, 0), abs=0.001)
    # Gradients of the first block are in buffers that have been taken from the pool.
    text = (tmp_path / "run" / "out_of_memory" / "rank-0.txt").read_text()
    assert float(re.findall(r"buffer: staged gradients\s+([\d.,]+) MB", text)[0].replace(",", "")) >= of_block
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["out_of_memory"] is True
    assert len(read_steps(tmp_path / "run")) == 2
    # The error, which a program may keep, refers to the frames of the step.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batch-reader")]
