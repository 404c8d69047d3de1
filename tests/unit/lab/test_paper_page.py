"""The page of the paper and its plots, from dry runs that are made up."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gpt.run_folder.files import NUMBERS_OF_A_STEP, append_records, start_run
from gpt.settings.parser import parse_settings
from lab.paper import claims, reproduce, results, throughput, today
from lab.paper.experiments import CONFIGS, Experiment, experiments
from lab.paper.results import CLUSTER, Result
from lab.planner.depth import DepthExtrapolation, Estimate
from lab.planner.layouts import CandidateLayout
from lab.planner.search import Search


def result(experiment: Experiment, relative_rate: float = 1.0, gigabytes: float = 20.0) -> Result:
    """Return a result whose rate is a multiple of the printed one."""
    per_second = experiment.tflops(1.0)
    seconds = per_second / (relative_rate * (experiment.measured_tflops or 30.0))
    estimate = Estimate(1e9, gigabytes * 1e9, 0.0, seconds)
    return Result(experiment, DepthExtrapolation((4, 8), (estimate, estimate)))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the plots that are written."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    return found


@pytest.mark.parametrize("figure", ["figure2", "figure3", "figure4", "figure6", "figure7", "figure8"])
def test_every_row_has_a_file_with_its_sizes(figure: str):
    for experiment in experiments(figure):
        row, settings = experiment.row, experiment.settings()
        model, train = settings.model, settings.train
        sizes = model.num_layers, model.hidden_size, model.num_heads, settings.parallel.tensor_size
        batches = train.micro_batch_size, train.global_batch_size
        columns = "layers", "hidden", "heads", "mp", "batch_per_replica", "total_batch"
        assert (*sizes, *batches) == tuple(int(row[name]) for name in columns), experiment.name
        assert settings.dry_run.world_size == int(row["gpus"])
        assert (settings.zero.stage == 0) is experiment.is_baseline


def test_sizes_are_in_their_order(monkeypatch: pytest.MonkeyPatch, figures: list[Figure]):
    monkeypatch.setattr(throughput, "results", lambda figure: tuple(map(result, experiments(figure))))
    throughput.against_size("figure4", "Figure 4")
    (axes,) = figures[0].axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == sorted(names, key=lambda name: float(name[:-1]))
    assert axes.get_xlabel() == "parameters of the model"


def test_a_run_that_does_not_leave_the_reserve_is_out_of_memory_and_has_no_rate():
    experiment = next(experiments("figure8"))
    gigabytes = CLUSTER.gpu_memory_bytes / 1e9
    just_fits, too_large = (result(experiment, 1.1, gigabytes - reserve) for reserve in (1.01, 0.99))
    assert just_fits.error == pytest.approx(0.1)
    assert (too_large.fits, too_large.tflops, too_large.error) == (False, None, None)
    fitting, oom = throughput.throughput_table([just_fits, too_large])[2:]
    assert "OOM" not in fitting
    assert "| OOM |" in oom


@pytest.mark.parametrize(
    ("options", "num_ranks", "cell"),
    [
        ([], 400, "36.0"),
        (["--train.steps=7", "--schedule.warmup_steps=0"], 400, "36.0"),
        ([], 384, "another run: ranks=384, not 400"),
        (["--zero.stage=1"], 400, "another run: zero.stage=1, not 2"),
        (["--train.micro_batch_size=1"], 400, "another run: train.micro_batch_size=1, not 32"),
    ],
)
def test_a_run_counts_as_that_of_a_row_only_with_its_settings_and_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], num_ranks: int, cell: str
):
    """Its rate is counted as the paper's are, 8 x parameters x tokens."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    experiment = next(one for one in experiments("figure2") if one.name == "100b-zero-400")
    assert results.measured_here(experiment) == ""
    folder, config = tmp_path / "runs/paper/figure2/100b-zero-400", CONFIGS / "figure2/100b-zero-400.yaml"
    start_run(folder, parse_settings([f"--config={config}", *options]).to_yaml(), 0)
    tokens_per_second = 36e12 * 400 / (8 * 12 * 125 * 8192**2)
    record = dict.fromkeys(NUMBERS_OF_A_STEP, 1.0) | {"step": 20, "ranks": num_ranks}
    record |= {"tokens_per_second": tokens_per_second, "hardware_tflops_per_device": 39.0}
    append_records(folder, [record])
    assert results.measured_here(experiment) == cell


def test_the_page_has_a_status_for_each_table_and_figure_of_the_paper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(throughput, "accuracy", lambda: iter(["accuracy"]))
    page = reproduce.page({name: (f"status of {name}", [f"lines of {name}"]) for name in reproduce.PARTS})
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for part in (*(f"Figure {n}" for n in range(1, 9)), *(f"Table {n}" for n in range(1, 3))):
        assert sum(row.startswith(f"| {part} ") for row in rows) == 1, part
    assert "| Figure 5 | status of figure5 |" in rows
    assert "| Section 9 | status of section9 |" in rows
    before, _, after = page.partition("\n\nlines of figure5\n\n")
    assert before.endswith("<!-- figure5 -->")
    assert after.startswith("<!-- /figure5 -->")


@pytest.mark.parametrize(
    ("sentence", "name", "relative_rate", "verdict"),
    [
        ("100B on 400 GPUs: over 38 TFLOPs a GPU", "100b-zero-400", 1.0, "right"),
        ("100B on 400 GPUs: over 38 TFLOPs a GPU", "100b-zero-400", 0.8, "off by -19%"),
        ("60B: C5 is slower than C4", "60b-c5-128", 1.0, "right"),
        ("60B: C5 is slower than C4", "60b-c5-128", 1.1, "not reproduced"),
    ],
)
def test_a_sentence_of_the_paper_is_right_or_off_or_not_reproduced(
    monkeypatch: pytest.MonkeyPatch, sentence: str, name: str, relative_rate: float, verdict: str
):
    """All other runs have the printed rates."""

    def made_up(figure: str) -> tuple[Result, ...]:
        return tuple(result(one, relative_rate if one.name == name else 1.0) for one in experiments(figure))

    row = {"model": "17B", "gpus": "256", "layers": "78", "hidden": "4256", "total_batch": "512"}
    monkeypatch.setattr(claims, "results", made_up)
    monkeypatch.setattr(claims, "turing_nlg", lambda: result(Experiment("figure5", row)))
    _, lines = claims.claims()
    (line,) = (line for line in lines if f"| {sentence} |" in line)
    assert line.endswith(f"| {verdict} |")


def test_figure_2_has_the_speed_ups_over_the_baseline(monkeypatch: pytest.MonkeyPatch, figures: list[Figure]):
    monkeypatch.setattr(throughput, "results", lambda figure: tuple(map(result, experiments(figure))))
    _, lines = throughput.against_size("figure2", "Figure 2")
    bars, speed_ups = figures[0].axes
    assert len(bars.containers) == 4
    paper, dry_run = (line.split(" | ")[1:] for line in lines[-2:])
    assert paper[names_of(lines).index("100B")] == dry_run[names_of(lines).index("100B")] == "10.1"  # 38.66 / 3.81
    assert speed_ups.get_lines()[0].get_ydata()[6] == pytest.approx(10.147, rel=1e-4)


def names_of(lines: list[str]) -> list[str]:
    return lines[-4].removesuffix(" |").split(" | ")[1:]


def test_a_part_is_printed_and_leaves_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(reproduce, "PAGE", tmp_path / "README.md")
    reproduce.main(["table1"])
    assert "54 of 54 cells equal the closed form" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        reproduce.main(["figure9"])
    assert "figure9 is no part of the page" in capsys.readouterr().err


def test_todays_rates_are_in_the_papers_unit(monkeypatch: pytest.MonkeyPatch, figures: list[Figure]):
    """A GPU that runs a step of its share of the batch in a second has 8 x parameters x its tokens."""
    layout = CandidateLayout(1, 2, "none", 1)

    def found(experiment: Experiment, world_size: int) -> tuple[CandidateLayout, Estimate, Search] | None:
        batch = int(experiment.row["total_batch"]) * world_size // experiment.num_gpus
        settings = today.settings_of(world_size, train__global_batch_size=batch)
        of_size = experiment.row["model"] == "8B" and world_size > 8
        return (layout, Estimate(8e9, 5e10, 0.0, 1.0), Search(settings, today.CLUSTER, world_size)) if of_size else None

    monkeypatch.setattr(today, "fastest", found)
    rows = [line.split(" | ")[1:6] for line in today.throughputs() if line.startswith("| 8B ")]
    rate = f"{8 * 12 * 72 * 3072**2 * 16 * 4 * 1024 / 4 / 1e12:.0f}"  # 64 sequences for each tensor group of 4
    assert rows[0][2] == "does not fit"
    assert [row[0] for row in rows] == ["8", "64", "400"]
    assert [row[3] for row in rows[1:]] == [rate, rate]
    assert figures[0].axes[0].get_ylabel() == "TFLOPs a GPU"
