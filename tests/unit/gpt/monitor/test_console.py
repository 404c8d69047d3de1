"""Lines of the console fit 80 columns, tables are not cut without a terminal, and curves that are equal both show."""

import errno
import re
import sys
from typing import Any
from unittest import mock

import pytest
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from gpt.monitor.console import ROWS_PER_HEADING, RunConsole, make_console, print_table
from gpt.monitor.plot import plot_loss, plot_losses
from gpt.settings.training import TrainSettings
from lab.dryrun.collectives import profile_table

LONG = {"step": 499_999, "loss": 10.123456, "lr": 3e-4, "grad_norm": 123.4567, "tokens_per_second": 1_234_567.8}
TRAIN = TrainSettings(steps=500_000, global_batch_size=2**16)


def printed(capsys: pytest.CaptureFixture[str], *records: dict[str, Any]) -> list[str]:
    console = RunConsole(is_quiet=False)
    for record in records:
        console.log_step(record, TRAIN, tokens_per_sample=2048)
    return capsys.readouterr().out.splitlines()


def test_a_row_fits_80_columns_with_all_that_it_may_show(capsys):
    heading, row = printed(capsys, LONG | {"mfu": 0.4567, "loss_scale": 2.0**16})
    assert len(heading) == len(row) <= 80
    assert heading.split() == ["time", "step", "loss", "lr", "norm", "tokens/s", "MFU", "scale", "left"]
    time, *cells = row.split()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", time)
    left = ["0:01:49"]  # 2**16 x 2048 tokens
    assert cells == ["499999/500000", "10.1235", "3.00e-04", "123.457", "1,234,568", "45.7%", "2^16", *left]


def test_a_cpu_has_no_mfu(capsys):
    heading, _ = printed(capsys, LONG | {"mfu": None})
    assert "MFU" not in heading


def test_the_heading_is_repeated(capsys):
    lines = printed(capsys, *[LONG | {"mfu": None}] * (ROWS_PER_HEADING + 1))
    assert [number for number, line in enumerate(lines) if "loss" in line] == [0, ROWS_PER_HEADING + 1]


def test_validation_and_texts_follow_their_step(capsys):
    samples = [{"prompt": "def", "text": "def f[red]:\n    pass"}]
    evaluated = LONG | {"mfu": None, "validation_loss": 1.25, "validation_perplexity": 3.49, "samples": samples}
    lines = printed(capsys, evaluated)[2:]
    assert lines[0].endswith(" validation loss 1.2500, perplexity 3.5")
    assert lines[1:] == ["--- generated text, step 499999", "def f[red]:", "    pass"]


def test_without_a_terminal_no_cell_is_cut(capsys):
    row = {"axis": "replica", "op": "reduce_scatter", "phase": "evaluation", "group_size": 1024, "count": 12345}
    row |= {
        "message_bytes": {"1000": 1, "67108864": 2},
        "first_position": 0.3,
        "last_position": 1.0,
        "blocking": 1,
        "wire_bytes": 7,
    }
    RunConsole(is_quiet=False).show(profile_table([row]))
    assert "reduce_scatter" in (output := capsys.readouterr().out)
    assert "…" not in output


def test_on_a_narrow_terminal_cells_are_broken_and_not_cut(capsys):
    console = make_console()
    console.width = 20
    table = Table("operation")
    table.add_row("a_long_operation_of_35_characters__")
    print_table(console, table)
    assert "…" not in capsys.readouterr().out


def test_runs_with_equal_losses_both_show_in_the_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(pyplot, "close", lambda figure: figures.append(figure))
    figures: list[Any] = []
    records = [{"tokens": 1_000_000 * step, "loss": 5.0 / step} for step in range(1, 20)]
    plot_losses({"a": records, "b": records, "c": records}, tmp_path / "compare.png")
    plot_losses({"a": records}, tmp_path / "one.png")
    plot_loss(records, tmp_path / "loss.png")
    assert figures[2].axes[0].get_legend().get_texts()[-1].get_text() == "training"
    monkeypatch.undo()
    widths = [[line.get_linewidth() for line in figure.axes[0].lines] for figure in figures]
    assert widths == [[4.0, 2.5, 1.0], [4.0], [1.0]]
    titles = [figure.axes[0].get_title() for figure in figures]
    assert titles == ["Training loss of 3 runs", "Training loss of 1 runs", f"Loss of {tmp_path.name}"]
    for figure in figures:
        labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert {"5M", "10M", "15M"} < set(labels)
        pyplot.close(figure)


def test_a_run_whose_output_cannot_be_written_goes_on_without_it(tmp_path, monkeypatch, caplog):
    console = RunConsole(is_quiet=False)
    full = OSError(errno.ENOSPC, "No space left on device")
    with open(tmp_path / "log", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with mock.patch.object(Console, "print", side_effect=full):
            console.say("a line")
        print("another line", file=file, flush=True)
    assert caplog.messages == ["the output cannot be written (No space left on device); the run goes on without it"]
    assert (tmp_path / "log").read_text() == ""
