"""The comparison of runs by their metrics.jsonl."""

from pathlib import Path

import pytest

from gpt.monitor.compare import figures_of, main, read_runs
from gpt.run_folder.files import append_records
from parallel.validation.errors import ConfigError


def write_run(folder: Path, losses: list[float], **last: float) -> Path:
    for step, loss in enumerate(losses, start=1):
        record = {"step": step, "loss": loss, "tokens": 1_000_000 * step, "skipped_steps": 0}
        record |= {"tokens_per_second": 100 * step, "model_tflops_per_device": 1.5, "peak_allocated_bytes": 3e6}
        record |= {"data_axis_bytes": 2_000_000, "tensor_axis_bytes": 0}
        append_records(folder, [record | (last if step == len(losses) else {})])
    return folder


def test_each_figure_is_computed_from_its_steps(tmp_path):
    (records,) = read_runs([write_run(tmp_path / "run", [3.0, 2.0, 1.0], validation_loss=1.25)]).values()
    assert figures_of(records) == {
        "step": "3",
        "tokens, M": "3.00",
        "loss": "1.0000",
        "validation": "1.2500",
        "tokens/s": "250",  # the median without the first step, which includes warm-up
        "TFLOPs/device": "1.5",
        "peak MB": "3",
        "data axis, MB": "2.00",
        "tensor axis, MB": "0.00",
        "skipped": "0",
    }


def test_runs_are_named_by_the_shortest_distinct_ends_of_their_paths(tmp_path, capsys):
    folders = [write_run(tmp_path / name / "run", [2.0, 1.0]) for name in ("a", "b")]
    (tmp_path / "a" / "run" / "config.yaml").write_text("not: [read")
    plot = tmp_path / "plot.png"
    main([str(folder) for folder in folders] + ["--plot", str(plot)])
    output = capsys.readouterr().out
    assert "a/run" in output
    assert "b/run" in output
    assert "- " in output  # the validation loss, which was not measured
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_settings_that_differ_are_shown_and_no_others(tmp_path, capsys):
    folders = [write_run(tmp_path / name, [2.0, 1.0]) for name in ("a", "b")]
    for folder, rate in zip(folders, (0.1, 0.2), strict=True):
        (folder / "config.yaml").write_text(f"optimizer:\n  lr: {rate}\n  eps: 1.0\nrun:\n  dir: {folder}\n")
    main([*map(str, folders), "--plot", str(tmp_path / "plot.png")])
    output = capsys.readouterr().out
    assert [word for word in ("optimizer.lr", "0.1", "0.2", "run.dir") if word not in output] == []
    assert "optimizer.eps" not in output


ALIASES = "".join(f"b{i}: &b{i} {{x: *b{i - 1}, y: *b{i - 1}}}\n" for i in range(1, 40))


@pytest.mark.parametrize("settings", [f"b0: &b0 [1]\n{ALIASES}", f"a: {'[' * 20_000}"], ids=["aliases", "brackets"])
def test_settings_that_grow_without_a_limit_are_left_out(tmp_path, capsys, settings: str):
    folders = [write_run(tmp_path / name / "run", [2.0, 1.0]) for name in ("a", "b")]
    (tmp_path / "a/run/config.yaml").write_text(settings)
    (tmp_path / "b/run/config.yaml").write_text("a: 1")
    main([*map(str, folders), "--plot", str(tmp_path / "plot.png")])
    assert "Settings that differ" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing/plot.png", "plot.unknown"])
def test_a_plot_that_cannot_be_written_is_named(tmp_path, name):
    folder = write_run(tmp_path / "run", [2.0, 1.0])
    with pytest.raises(ConfigError, match=rf"--plot={tmp_path}/{name} cannot be written \(.*\); choose another"):
        main([str(folder), "--plot", str(tmp_path / name)])


def test_a_folder_without_steps_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics.jsonl has no logged step; name the run.dir"):
        read_runs([tmp_path])
