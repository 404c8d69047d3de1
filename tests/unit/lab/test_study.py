"""A study of variants: what it trains, what it repeats, and what it says of pairs of runs with one seed."""

import json
from pathlib import Path

import numpy as np
import pytest

from lab.bench import study
from lab.bench.study import Curves, standard_error
from parallel.validation.errors import ConfigError
from tests.source_files import ROOT
from tests.unit.lab.stub_launch import write_launch

STUDY = """
options: --config configs/quickstart.yaml --train.steps=4
corpora: {code: runs/code, prose: runs/prose}
seeds: [1, 2]
variants:
  adamw: --optimizer.lr 0.5
  muon: {options: --optimizer.name muon, rates: [0.1, 0.2]}
"""
LOSSES = {  # in the order of the runs
    "code/adamw/1": [9.0, 5.0],
    "code/muon/0.1-1": [9.0, 4.5],
    "code/muon/0.2-1": [7.0, 4.0],
    "code/adamw/2": [9.0, 5.5],
    "code/muon/0.2-2": [8.5, 4.5],
    "prose/adamw/1": [6.0, 3.0],
    "prose/muon/0.2-1": [6.0, 2.0],
    "prose/adamw/2": [6.0, 3.0],
    "prose/muon/0.2-2": [6.0, 2.5],
}


def run(folder: Path, losses: dict[str, list[float]]) -> None:
    (folder / "study.yaml").write_text(STUDY)
    output = "--output", str(folder / "runs")
    study.main([str(folder / "study.yaml"), *output, "--launch", write_launch(folder, losses)])


def test_an_interrupted_study_goes_on_with_the_runs_that_are_left(tmp_path, capsys):
    def started() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line.split(f"run.dir={tmp_path}/runs/")[1].split()[0] for line in lines if line.startswith("+ ")]

    tried = ["code/adamw/1", "code/muon/0.1-1", "code/muon/0.2-1"]
    with pytest.raises(ConfigError, match=r"code/muon/0.2-1\.log"):
        run(tmp_path, {name: LOSSES[name] for name in tried[:2]})
    assert started() == tried
    run(tmp_path, LOSSES)
    assert started() == [name for name in LOSSES if name not in tried[:2]]
    run(tmp_path, {})
    assert started() == []
    runs = json.loads((tmp_path / "runs/study.json").read_text())
    assert len(runs) == len(LOSSES)
    assert runs[0]["validation_loss"] == [[20, 9.0], [40, 5.0]]
    assert (tmp_path / "runs/study.png").stat().st_size > 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a study whose runs are all complete."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder, LOSSES)
    return folder


def test_variants_are_compared_in_pairs_with_one_seed(finished):
    rows = [line.split(" | ") for line in (finished / "runs/study.md").read_text().splitlines()]
    assert rows[2] == ["| muon", "4.500", "**4.000** |"]
    # All get to 5.5, the higher one of the baseline's last losses; its first seed after 7 / 8 of the second half.
    assert rows[6][2] == "tokens to 5.500"
    assert rows[8][:3] == ["| adamw", "5.000, 5.500", f"{(37.5 + 40) / 2:.0f}"]
    shares = np.array([(20 + 20 * 1.5 / 3) / 37.5, (20 + 20 * 3 / 4) / 40])
    error = abs(shares[0] - shares[1]) / 2  # of the mean of two
    assert rows[9] == ["| muon", "4.000, 4.500", "32", "-1.000 ± 0.000", f"{shares.mean():.2f} ± {error:.2f} |"]
    assert rows[16][3] == "-0.750 ± 0.250"


def test_differences_are_of_equal_seeds_and_tokens():
    baseline = Curves(np.array([10, 20, 30]), np.array([[3.0, 2.0, 1.0], [6.0, 5.0, 4.0], [4.0, 4.0, 4.0]]))
    other = Curves(np.array([10, 30]), np.array([[2.0, 1.0], [4.0, 2.0], [1.0, 1.0]]))
    gaps = other.minus(baseline)
    assert gaps.tokens.tolist() == [10, 30]
    assert gaps.losses.tolist() == [[-1, 0], [-2, -2], [-3, -3]]
    # The standard deviation of -1, -2 and -3 is 1.
    assert standard_error(gaps.losses)[0] == pytest.approx(3**-0.5)
    assert np.isnan(standard_error(gaps.losses[:1])).all()
    assert np.isnan(baseline.tokens_to(0.5)).all()


def test_a_run_with_other_settings_is_not_taken_for_one_of_the_study(finished):
    def first() -> study.Run:
        of_study = study.Study(finished / "study.yaml", finished / "runs")
        return of_study.run(of_study.tried()[0])

    config = Path(first().settings.run.dir) / "config.yaml"
    config.write_text(first().settings.to_yaml())
    assert first().loss == LOSSES["code/adamw/1"][-1]
    config.write_text(config.read_text().replace("weight_decay: 0.1", "weight_decay: 0.2"))
    with pytest.raises(ConfigError, match=r"code/adamw/1 has a run with other settings"):
        run(finished, {})
    config.unlink()


def test_a_rate_that_diverged_is_not_the_best(tmp_path):
    run(tmp_path, LOSSES | {"code/muon/0.1-1": [9.0, float("nan")]})
    assert "| muon | nan | **4.000** |" in (tmp_path / "runs/study.md").read_text()
    assert "NaN" not in (tmp_path / "runs/study.json").read_text()


def test_a_study_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        study.Study(tmp_path / "none.yaml", tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY.replace("[1, 2]", "[]"))
    with pytest.raises(ConfigError, match=r"study\.yaml has no seeds"):
        study.Study(tmp_path / "study.yaml", tmp_path)


def test_a_variant_that_does_not_exist_is_refused(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    with pytest.raises(ConfigError, match="has no soap; choose of adamw, muon"):
        study.Study(tmp_path / "study.yaml", tmp_path, ["soap"])


@pytest.mark.parametrize("path", sorted((ROOT / "lab/bench/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_settings_of_every_study_are_accepted(path: Path):
    found = study.Study(path, Path("runs/study"))
    keys = [*found.tried(), *found.chosen()]
    assert len({found.run(key).settings.run.dir for key in keys}) == len(set(keys))
