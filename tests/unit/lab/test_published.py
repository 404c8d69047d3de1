"""The predictions of published throughputs, compared with docs/published, and those of rows that no one expects."""

import csv
import math
import re
from pathlib import Path

import pytest

from lab.measure.fit import fitted
from lab.published import predict
from lab.published.calibrate import ALL_FITS, FITS
from lab.published.predict import Prediction, load_cluster
from lab.published.row_settings import configuration, settings_of, settings_tree
from lab.published.rows import LATE_ROWS, ROWS, Row, read_rows
from lab.published.sources import cluster_name
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT

PAGES = "".join((ROOT / "docs/published" / name).read_text() for name in ("README.md", "fp8.md"))
BY_ID = {row.id: row for row in read_rows()}
LATE_BY_ID = {row.id: row for row in read_rows(LATE_ROWS)}
WITHOUT_TENSOR_AXIS = "MosaicML_H100-24x2048-n128-s2048-b12", "Megatron_v1.1_A100-24x1920-n1-s1024-b16"

IN_FP8 = ("DGX_Cloud_25.04-nemotron4-15b-H100-n16-s4096-b2-tp2-fp8-tensorwise",)


def figures_on_page(row: Row) -> tuple[str, str]:
    """Return the predicted TFLOPs and the peak that the page shows for a row."""
    cells = re.findall(rf"^\| {re.escape(row.id)} \|.*$", PAGES, re.MULTILINE)[-1].split(" | ")
    return cells[2], cells[-2]


def predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Prediction]:
    monkeypatch.setattr(predict, "KEPT_RUNS", tmp_path)
    return [predict.predicted((BY_ID | LATE_BY_ID)[name]) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        ("Megatron_v1.1_V100-36x3072-n4-s1024-b8",),
        pytest.param(WITHOUT_TENSOR_AXIS, marks=pytest.mark.full),  # the first of them loads inductor
        pytest.param(IN_FP8, marks=pytest.mark.full),
    ],
)
def test_rows_are_predicted_as_on_the_page(tmp_path, monkeypatch, names):
    for found in predicted(tmp_path, monkeypatch, *names):
        assert (f"{found.tflops:.1f}", f"{found.peak_bytes / 1e9:.1f}") == figures_on_page(found.row)


def test_a_row_that_no_dry_run_can_have_is_predicted_by_a_closed_form(tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "record_all", lambda rows, num_jobs: None)  # which starts processes
    rows, output = tmp_path / "rows.csv", tmp_path / "out.csv"
    odd = "odd,Someone,L40S,3,7,999,7,777,50001,2,2,5,31,F1"
    rows.write_text(f"id,source,gpu,gpus,layers,hidden,heads,seq,vocab,stage,tp,micro,global_batch,basis\n{odd}\n")
    predict.main([str(rows), "--output", str(output), "--jobs", "1"])
    (found,) = csv.DictReader(output.open())
    assert tuple(found) == predict.COLUMNS
    assert found["id"] == "odd"
    assert all(float(found[name]) > 0 for name in predict.COLUMNS[1:])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("id,gpus,layers\nx,8,0\n", "line 2: row x has a size below 1"),
        ("id,gpus\nx,many\n", "line 2: could not convert string to float: 'many'"),
        ("gpus,layers\n8,1\n", "line 2: a row has no id"),
        (None, "rows.csv cannot be read"),
    ],
)
def test_rows_that_are_wrong_are_refused(tmp_path, lines, said):
    path = tmp_path / "rows.csv"
    if lines:
        path.write_text(lines)
    with pytest.raises(ConfigError, match=said):
        read_rows(path)


def test_every_configuration_is_that_of_its_row_and_is_accepted():
    files = {path.stem: path.read_text() for path in ROWS.parent.glob("*.yaml")}
    assert files == {row.id: configuration(row) for row in BY_ID.values()}
    for row in BY_ID.values():
        settings_of(settings_tree(row), row.tp * row.data_size)


def test_flops_are_counted_as_the_source_counts_them():
    row = BY_ID["Megatron_v1.1_V100-24x1920-n1-s1024-b8"]  # 1121 ms are 71.9 TFLOPs
    assert row.tflops(1.121) == pytest.approx(71.9, abs=0.1)
    row = BY_ID["DeepSpeed_V100-50x4096-n32-s1024-b1"]  # 6.93 samples a second are 18.3 TFLOPs
    assert row.tflops(32 / 6.93) == pytest.approx(18.3, rel=0.02)


def test_rows_of_later_programs_count_flops_as_their_sources_and_can_be_run():
    for line in csv.DictReader(LATE_ROWS.open()):
        row, tokens_per_second = LATE_BY_ID[line["id"]], float(line["tokens_per_second_per_gpu"])
        assert row.flops / row.num_tokens == pytest.approx(float(line["flops_per_token_check"]), rel=1e-3), row.id
        seconds = row.num_tokens / row.num_ranks / tokens_per_second
        assert row.tflops(seconds) == pytest.approx(row.published_tflops, rel=0.01), row.id
        assert row.tokens_per_second(seconds) == pytest.approx(tokens_per_second), row.id
        settings_of(settings_tree(row), row.tp * row.data_size)


def test_the_fit_finds_constants_and_leaves_those_that_no_row_determines():
    def errors(constants: dict[str, float]) -> list[float]:
        return [constants["gemm_fraction"] / 0.6 - 1]

    found = fitted({"gemm_fraction": 0.9, "memory_fraction": 0.5}, errors)
    assert found == pytest.approx({"gemm_fraction": 0.6, "memory_fraction": 0.5}, rel=1e-6)
    assert fitted({"gemm_fraction": 0.9}, lambda constants: []) == pytest.approx({"gemm_fraction": 0.9})


def test_cluster_files_of_a_type_have_the_same_constants_and_at_most_three_are_fitted():
    assert all(len(fit.rows) <= 3 for fit in FITS.values())
    for fit in ALL_FITS.values():
        assert len(fit.before) <= 3
        constants = [[getattr(load_cluster(file), name) for name in fit.before] for file in fit.files]
        assert all(math.isclose(a, b) for one in constants for a, b in zip(constants[0], one, strict=True))


def test_every_cluster_file_is_accepted_and_only_those_of_fitted_rows_are_calibrated():
    files = {path.stem: load_cluster(path.stem) for path in (ROOT / "configs/clusters").glob("*.yaml")}
    assert {name for name, cluster in files.items() if cluster.name != name} == set()
    by_id = BY_ID | LATE_BY_ID
    of_rows = {cluster_name(by_id[name]) for fit in ALL_FITS.values() for name in fit.rows}
    assert {name for name, cluster in files.items() if cluster.calibrated} == of_rows | {"dgx-2"}
    # The errors of rows that were not fitted are known for all of them but one, which has three rows.
    assert {name for name, cluster in files.items() if cluster.remark == ""} == {"dgx-2-nccl"}
