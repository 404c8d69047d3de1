"""The planner's layouts for published runs, which are at least as fast as the published ones and fit."""

import dataclasses
import re

import pytest

from lab.planner import depth
from lab.planner.layouts import CandidateLayout
from lab.published import predictions
from lab.published.planner import PAGE, ROWS, compare, lines, published_layout, search_of
from lab.published.rows import read_rows

BY_ID = {row.id: row for row in read_rows()}
TABLE = {match[1]: match[0] for match in re.finditer(r"^\| (\S+) \|.*\|$", PAGE.read_text(), re.MULTILINE)}


def test_a_published_layout_runs_in_this_program_with_its_buckets_and_the_published_batch():
    row = BY_ID["MosaicML_H100-24x2048-n512-s2048-b12"]
    assert published_layout(row) == CandidateLayout(1, 2, "none", 12)
    settings = published_layout(row).applied_to(search_of(row).settings)
    assert (settings.zero.bucket_numel, settings.zero.overlap, settings.zero.overlap_gather) == ("auto", True, True)
    assert (settings.train.global_batch_size, settings.model.num_layers) == (6144, 24)
    assert str(settings.zero.reduce_dtype) == row.reduce_dtype
    assert published_layout(BY_ID["Megatron_v1.1_A100-36x3072-n4-s1024-b16"]) == CandidateLayout(4, 0, "keep", 16)
    assert published_layout(BY_ID["DeepSpeed_Azure-96x12288-n256-s512-b32"]).offload == "host"


def test_the_planner_is_at_least_as_fast_as_a_layout_that_recomputes_and_says_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "KEPT_RUNS", tmp_path)
    monkeypatch.setattr(depth, "DEPTHS", (1, 2))
    real = BY_ID["Megatron_v1.1_V100-24x1920-n1-s1024-b8"]
    tiny = {"gpus": 2, "layers": 3, "hidden": 256, "heads": 4, "seq": 64, "vocab": 512, "micro": 1, "global_batch": 2}
    row = dataclasses.replace(real, **tiny)
    found = compare(row, num_to_verify=1)
    assert found.published == CandidateLayout(1, 0, "keep", 1)
    assert found.search.fits(found.of_best)
    assert found.best.store == "none", "so it is faster"
    cost = found.search.cost(found.of_published)
    assert cost.tokens == pytest.approx(20 * row.parameters, abs=2 * 64)
    assert cost.gpu_hours == pytest.approx(cost.tokens / (2 * 64) * found.of_published.seconds * 2 / 3600)
    assert found.of_best.seconds < found.of_published.seconds
    assert len(list(tmp_path.iterdir())) == 3, "those of each tensor size and of the published one"
    monkeypatch.setattr(depth, "dry_run", None)
    assert compare(row, num_to_verify=1) == found


@pytest.mark.full
def test_every_row_of_the_page_is_what_the_planner_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "KEPT_RUNS", tmp_path)
    found = [compare(BY_ID[name]) for name in ROWS]
    assert all(one.search.fits(one.of_best) and one.ratio <= 1 for one in found)
    assert list(lines(found))[2:] == [TABLE[name] for name in ROWS]
