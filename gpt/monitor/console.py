"""Console output of the first rank: a description of the run, its memory, a line per logged step, and a summary."""

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gpt.builder.activation_store import sent_bytes_of
from gpt.builder.train_state import TrainState
from gpt.model.transformer import GPT
from gpt.monitor.units import count
from gpt.settings.settings import Settings
from gpt.settings.training import TrainSettings
from parallel.memory_kinds import Placement
from parallel.tensor.linear_cross_entropy import temporary_bytes
from parallel.validation.errors import printable
from zero.activations.stores import STORES, stored_bytes
from zero.checkpoint import resident
from zero.formulas import memory

logger = logging.getLogger(__name__)

ROWS_PER_HEADING = 20
LOG_WIDTH = 200  # of tables in a file or a pipe, where nothing is cut to the width of a terminal


class _PrintableFormatter(logging.Formatter):
    """A formatter of lines in which names may stand that come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def start_logging(is_first: bool) -> None:
    """Print what is logged, in lines without a heading; of ranks other than the first one, errors only."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, handlers=[handler])


def make_console(is_quiet: bool = False) -> Console:
    """Return a console whose lines are never broken, and whose tables are not cut if there is no terminal."""
    console = Console(quiet=is_quiet, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a terminal that is too narrow, its cells take several lines, and none is cut."""
    _fold(table)
    console.print(table, soft_wrap=False)


def _fold(table: Table) -> None:
    for column in table.columns:
        column.overflow = "fold"


class RunConsole:
    """The console, which on a terminal also shows a progress bar. Ranks other than the first have a quiet one.

    If the output cannot be written, such as to a file on a full disk, the run goes on without it.
    """

    def __init__(self, is_quiet: bool):
        self._console = make_console(is_quiet)
        self._num_rows = 0
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
            disable=is_quiet or not self._console.is_terminal,
        )

    def say(self, text: str) -> None:
        """Print lines of text."""
        self._print(Text(printable(text)))

    def report(self, text: str) -> None:
        """Print a line of text after the time of day. Other threads may call it."""
        self.say(f"{_time_of_day()} {text}")

    def show(self, table: Table) -> None:
        """Print a table."""
        _fold(table)
        self._print(table)

    def log_step(self, record: dict[str, Any], train: TrainSettings, tokens_per_sample: float) -> None:
        """Print the metrics of a logged step in columns, with a heading every few rows, and its texts."""
        time, columns = _time_of_day(), step_columns(record, train, tokens_per_sample)
        if self._num_rows % ROWS_PER_HEADING == 0:
            self.say(" ".join(["    time", *(f"{name:>{width}}" for name, width, _ in columns)]))
        self._num_rows += 1
        self.say(" ".join([time, *(f"{text:>{width}}" for _, width, text in columns)]))
        if "validation_loss" in record:
            loss, perplexity = record["validation_loss"], record["validation_perplexity"]
            of_corpora = _under(record, "validation_loss/")
            parts = "".join(f"; {name} {of_one:.4f}" for name, of_one in of_corpora.items())
            self.say(f"{time} validation loss {loss:.4f}, perplexity {perplexity:,.1f}{parts}")
        for line in task_lines(record):
            self.say(f"{time} {line}")
        for sample in record.get("samples", []):
            self.say(f"--- generated text, step {record['step']}\n{sample['text']}")

    def _print(self, content: Text | Table) -> None:
        try:
            self._console.print(content, soft_wrap=isinstance(content, Text))
        except OSError as error:
            logger.warning("the output cannot be written (%s); the run goes on without it", error.strerror)
            # Of the whole process: what Python still buffers would fail again, at the latest when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    @contextmanager
    def progress(self, num_done: int, num_steps: int) -> Iterator[None]:
        """Show the progress bar inside this context, beginning at `num_done` of `num_steps` steps."""
        with self._progress:
            self._task = self._progress.add_task("", total=num_steps, completed=num_done)
            yield

    def advance(self) -> None:
        """Move the progress bar by one step."""
        self._progress.advance(self._task)


def _under(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of a record whose keys begin with a prefix, by the rest of their keys."""
    return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


def task_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each task by which the model was judged."""
    metrics: dict[str, list[str]] = {}
    for name, value in _under(record, "task/").items():
        task, _, metric = name.rpartition("/")
        metrics.setdefault(task, []).append(f"{metric.replace('_', ' ')} {value:,.4g}")
    return [f"{task}: {', '.join(found)}" for task, found in metrics.items()]


def nothing_left(settings: Settings, num_done: int) -> str:
    """Return what to change if a run has no steps left."""
    return (
        f"nothing was left to do: {settings.run.dir} has {num_done} steps, and train.steps={settings.train.steps}.\n"
        f"Choose another run.dir for another run, train.steps above {num_done} to go on with this one, or\n"
        "checkpoint.resume=never to begin it anew."
    )


def describe_run(state: TrainState, train: TrainSettings, run_dir: str) -> str:
    """Return lines with the size of the model, the types, the ranks and the batch."""
    mesh, model, zero = state.mesh, state.config, state.model.config
    num_tokens = train.global_batch_size * model.seq_length
    data = f"{mesh.data.size} data{f' ({mesh.context.size} context)' if mesh.context.size > 1 else ''}"
    return (
        f"{count(state.num_parameters_of_model)} parameters: {model.num_layers} layers x {model.hidden_size}, "
        f"{model.seq_length} tokens, {train.precision}\n"
        f"ZeRO stage {zero.stage}, {data} x {mesh.tensor.size} tensor ranks on {state.device.type}\n"
        f"gradients summed in {zero.accumulate_dtype} and reduced in {zero.reduce_dtype}\n"
        f"{train.steps:,} steps, batch {train.global_batch_size} x {model.seq_length} = {num_tokens:,} tokens\n"
        f"run.dir {run_dir}"
    )


def memory_table(state: TrainState, train: TrainSettings) -> Table:
    """Return a table of this rank's model states, beside the paper's formula, and of its buffers.

    Moments before the first step, and gradients that are freed between steps, are counted with the size that they will
    have.
    """
    num_parameters, group_size, zero = state.num_parameters, state.model.group_size, state.model.config
    state_bytes = state.optimizer.state_bytes_per_element
    gradient_bytes = zero.gradient_types(train.dtype).accumulate.itemsize
    data_size, itemsize = state.mesh.data.size, train.dtype.itemsize
    expected = memory.formula(zero.policy, num_parameters, data_size, itemsize, state_bytes, gradient_bytes, group_size)
    table = Table(title=f"Model states per rank, stage {zero.stage}", title_justify="left")
    for heading in ("", "MB", "formula, MB", "bytes per parameter"):
        table.add_column(heading, justify="left" if not heading else "right")
    offloaded = state.model.offload.offloaded_states
    placed = memory.placed(expected, zero.policy, group_size, offloaded)
    for placement, formula in ((Placement.ACCELERATOR, placed.accelerator), (Placement.HOST, placed.host)):
        if not formula.total:
            continue
        found = resident.resident_states(state.model, state.optimizer, placement)
        buckets = [bucket for bucket in state.optimizer.buckets if resident.placement_of(bucket.home) is placement]
        moments = found.moments or sum(bucket.master.numel() for bucket in buckets) * state_bytes
        gradients = found.gradients or sum(bucket.grads.total.rest.nbytes for bucket in buckets)
        rows = {field.name: getattr(found, field.name) for field in fields(found)}
        rows |= {"gradients": gradients, "moments": moments}
        where = f", {placement.name.lower()}" if offloaded else ""
        for name, num_bytes in [*rows.items(), ("total", sum(rows.values()))]:
            per_parameter = f"{num_bytes / num_parameters:.2f}"
            expected_mb = f"{getattr(formula, name) / 1e6:,.2f}"
            table.add_row(name + where, f"{num_bytes / 1e6:,.2f}", expected_mb, per_parameter)
        table.add_section()
    for name, num_bytes, remark in [*_checkpoint_rows(state, train), *_buffer_rows(state, train)]:
        table.add_row(name, f"{num_bytes / 1e6:,.2f}", remark, "")
    return table


def _checkpoint_rows(state: TrainState, train: TrainSettings) -> Iterator[tuple[str, float, str]]:
    """Yield (name, bytes, remark) of the activation checkpoints of one micro-batch."""
    gpt, model, itemsize = state.model.module, state.config, train.dtype.itemsize
    assert isinstance(gpt, GPT)
    activations = state.activations
    if activations.store not in STORES:
        return
    num_tokens = train.micro_batch_size * model.seq_length // gpt.tokens.num_parts
    numel, count = num_tokens * model.hidden_size, math.ceil(model.num_layers / activations.layers_per_checkpoint)
    stored = stored_bytes(activations.store, count, numel, itemsize, gpt.tokens.replicas.size)
    whole = count * numel * itemsize
    places = {"device": stored.device, "host": stored.host}
    for place, num_bytes in places.items():
        if num_bytes or place == "device":
            yield f"checkpoints, {place}", num_bytes, f"{num_bytes / whole:.0%} of {whole / 1e6:,.2f} unpartitioned"
    yield "buffer: checkpoints", stored.in_transit, "constant"


def _buffer_rows(state: TrainState, train: TrainSettings) -> Iterator[tuple[str, float, str]]:
    """Yield (name, bytes, remark) of the buffers and temporaries of constant size (C_B)."""
    model, gpt = state.model, state.model.module
    assert isinstance(gpt, GPT)
    remark = "constant" if model.config.bucket_numel else "grows with the model"
    for name, num_bytes in resident.buffer_bytes(model, state.optimizer).items():
        yield f"buffer: {name}", num_bytes, remark
    num_tokens = train.micro_batch_size * state.config.seq_length
    num_bytes = temporary_bytes(num_tokens, gpt.head_weight, gpt.softmax)
    yield "buffer: loss", num_bytes, "constant"
    yield "buffer: gradient norm", state.optimizer.grad_norm.temporary_bytes, "constant"
    if gathered := resident.gathered_bytes(model, model.residency.prefetch_numel):
        yield "buffer: prefetched parameters", gathered, "at most"


def step_columns(record: dict[str, Any], train: TrainSettings, tokens_per_sample: float) -> list[tuple[str, int, str]]:
    """Return (heading, width, text) of the metrics of a logged step; with the time of day they fit 80 columns."""
    tokens_left = (train.steps - record["step"]) * train.global_batch_size * tokens_per_sample
    minutes, seconds = divmod(round(tokens_left / record["tokens_per_second"]), 60)
    columns = [
        ("step", 2 * len(f"{train.steps}") + 1, f"{record['step']}/{train.steps}"),
        ("loss", 7, f"{record['loss']:.4f}"),
        ("lr", 8, f"{record['lr']:.2e}"),
        ("norm", 7, f"{record['grad_norm']:.3f}"),
        ("tokens/s", 9, f"{record['tokens_per_second']:,.0f}"),
    ]
    if record["mfu"] is not None:
        columns.append(("MFU", 5, f"{record['mfu']:.1%}"))
    if "loss_scale" in record:
        columns.append(("scale", 5, f"2^{math.log2(record['loss_scale']):g}"))
    return [*columns, ("left", 8, f"{minutes // 60}:{minutes % 60:02}:{seconds:02}")]


def _time_of_day() -> str:
    return f"{datetime.now():%H:%M:%S}"


def summary_table(state: TrainState, train: TrainSettings, records: list[dict[str, Any]]) -> Table:
    """Return a table of the last logged step, with the first loss and the traffic that the paper predicts."""
    first, last = records[0], records[-1]
    num_micro_batches = train.num_micro_batches(state.mesh.num_batch_ranks)
    sizes = state.model.group_size, state.mesh.data.size // state.model.group_size
    numels = state.num_parameters, state.num_coded_parameters
    expected = sum(sent_bytes_of(state.model.config, train.dtype, numels, sizes, num_micro_batches))
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_row("loss", f"{first['loss']:.3f} (step {first['step']}) -> {last['loss']:.3f} (step {last['step']})")
    if "validation_loss" in last:
        loss, perplexity = last["validation_loss"], last["validation_perplexity"]
        table.add_row("validation", f"loss {loss:.3f}, perplexity {perplexity:,.1f}")
    table.add_row("tokens", f"{last['tokens']:,}")
    table.add_row(
        "speed", f"{last['tokens_per_second']:,.0f} tokens/s, {last['model_tflops_per_device']:.3g} TFLOPs/device"
    )
    table.add_row(
        "data axis", f"{last['data_axis_bytes'] / 1e6:,.2f} MB per step and rank; paper: {expected / 1e6:,.2f}"
    )
    table.add_row("peak memory", f"{last['peak_allocated_bytes'] / 1e6:,.0f} MB")
    if state.device.type == "cuda":
        unused, retries = last["reserved_unused_bytes"] / 1e6, last["allocation_retries"]
        table.add_row("fragmentation", f"{unused:,.0f} MB reserved and unused, {retries} allocations retried")
    table.add_row("skipped steps", str(last["skipped_steps"]))
    return table
