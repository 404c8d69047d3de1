"""The report of a dry run: RUN/report.json for programs, and tables for people."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from gpt.builder.host_memory import bytes_on_host
from gpt.monitor.collectives import profile
from gpt.monitor.console import RunConsole
from gpt.monitor.units import count, num_bytes, seconds, unit_of
from gpt.settings.settings import Settings
from gpt.shape.flops import hardware_flops, model_flops
from lab.dryrun.collectives import REPORT, profile_table, right_aligned
from lab.dryrun.dry_run import DEVICE, HOST, Recording, dry_run, no_garbage_collection
from lab.dryrun.plots import plot_lanes, plot_memory
from lab.dryrun.projection import Timeline, project_recording
from lab.dryrun.run_cost import RunCost
from lab.measure.cluster import ClusterSpec
from lab.measure.kernel_costs import kernel_seconds
from parallel.memory_kinds import TensorKind
from parallel.validation.errors import ConfigError
from zero.updates.matrix_update import MatrixUpdate


def run_and_report(settings: Settings, console: RunConsole) -> None:
    """Run the dry run of `settings`, print its report, and write it with its plots.

    Raise ConfigError if the settings do not suit the imitated world, or the report cannot be written.
    """
    recording, folder = dry_run(settings), Path(settings.run.dir)
    # The collector would traverse the many objects of a deep model's recording again and again.
    with no_garbage_collection():
        cluster = settings.dry_run.cluster
        timeline = project_recording(recording, ClusterSpec.load(cluster)) if cluster else None
        report = make_report(recording, settings, timeline)
        console.say(headline(report))
        if recording.num_left_out:
            console.say(f"{recording.num_left_out} micro-batches were not run, but counted: they are like the others")
        if settings.data.mask_documents:
            console.say("documents are kept apart: time, FLOPs and MFU are those of one document a sequence")
        if line := budget_line(settings):
            console.say(line)
        if "matrices" in report:
            console.say(matrices_line(report["matrices"]))
        if timeline:
            num_ranks = recording.state.mesh.size
            audits = report["step"]["audit_seconds"] = timeline.seconds * settings.audit_share(num_ranks)
            if audits:
                console.say(f"audits take {seconds(audits)} of each step in the mean")
            cost = RunCost.of(settings, timeline.seconds + audits, num_ranks, timeline.cluster)
            report["run"] = asdict(cost)
            console.say(f"the whole run: {cost}{timeline.cluster.remark}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
            plot_memory(recording, folder / "memory.png", timeline)
            if timeline:
                plot_lanes(timeline, folder / "lanes.png")
                if settings.dry_run.trace:
                    Path(settings.dry_run.trace).write_text(json.dumps(trace_events(timeline)))
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be written ({error.strerror}); choose another run.dir or dry_run.trace"
            ) from error
        console.show(memory_table(report))
        console.show(profile_table(report["collectives"]))
    console.say(f"the full report and its plots are in {folder}")


def budget_line(settings: Settings) -> str | None:
    """Return a line that says what is not counted, if the settings have a budget of activations."""
    if (budget := settings.activations.budget) is None:
        return None
    return f"activations.budget={budget} is not priced: a step may need less memory, and more time, than is stated here"


def make_report(recording: Recording, settings: Settings, timeline: Timeline | None) -> dict[str, Any]:
    """Return the report as a tree for JSON.

    With the timeline of a step on a cluster, the report also says if the run fits there, and how fast it is.
    """
    state, size, model = recording.state, recording.state.mesh.size, recording.state.config
    global_batch_size = settings.train.global_batch_size
    events = [event for event in recording.events for _ in range(recording.num_times(event.launched))]
    sent: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        sent[event.axis, event.op, event.phase] += event.wire_bytes
    report: dict[str, Any] = {
        "world_size": size,
        "rank": settings.dry_run.rank,
        "data_size": state.mesh.data.size,
        "tensor_size": state.mesh.tensor.size,
        "imitated_backend": settings.dry_run.backend,
        "parameters": state.num_parameters_of_model,
        "parameters_of_this_rank": state.num_parameters,
        "resident_bytes": recording.resident,
        "peak_bytes": recording.peak,
        "allocations": recording.num_allocations,
        "building_peak_bytes": recording.building_peak_bytes,
        "traffic_bytes": [
            {"axis": axis, "op": op, "phase": phase, "bytes": num_sent}
            for (axis, op, phase), num_sent in sorted(sent.items())
        ],
        "model_flops": model_flops(model, global_batch_size) / size,
        "hardware_flops": hardware_flops(model, global_batch_size, state.activations.recomputes) / size,
        "counted_flops": sum(
            kernel.flops * recording.num_times(number) for number, kernel in enumerate(recording.kernels)
        ),
        "collectives": profile(events, len(recording.kernels)),
    }
    for update in state.optimizer.updates:
        if isinstance(update, MatrixUpdate):
            report["matrices"] = work_on_matrices(update)
    if timeline is not None:
        cluster = timeline.cluster
        report["cluster"] = asdict(cluster)
        report["fits"] = sum(recording.peak[DEVICE].values()) <= cluster.usable_gpu_bytes
        on_node = min(size, cluster.gpus_per_node)
        on_host = sum(recording.peak[HOST].values()) * on_node
        if settings.checkpoint.snapshot_every:  # a dry run saves nothing
            saved = bytes_on_host(settings, state.mesh, float, size // on_node)
            on_host += round(saved.snapshots + saved.saves) * on_node
        report["node_host_bytes"] = on_host
        report["fits_host"] = on_host <= cluster.host_memory_gb * 1e9
        report["step"] = {
            "seconds": timeline.seconds,
            "busy_seconds": timeline.busy_seconds(),
            "model_tflops_per_device": report["model_flops"] / timeline.seconds / 1e12,
            "hardware_tflops_per_device": report["hardware_flops"] / timeline.seconds / 1e12,
            "tokens_per_second": global_batch_size * model.seq_length / timeline.seconds,
            "mfu": report["model_flops"] / timeline.seconds / (cluster.peak_half_tflops * 1e12),
        }
        report["kernels"] = seconds_by_kernel(recording, cluster)
    return report


def seconds_by_kernel(recording: Recording, cluster: ClusterSpec) -> list[dict[str, Any]]:
    """Return the projected time of the accelerator's kernels, a row for each phase and name, the longest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, kernel in enumerate(recording.kernels):
        if not kernel.is_on_host and not kernel.is_transfer:
            empty = {"phase": kernel.phase, "name": kernel.name, "count": 0, "bytes": 0, "flops": 0, "seconds": 0.0}
            row = rows.setdefault((kernel.phase, kernel.name), empty)
            num_times = recording.num_times(number)
            row["count"] += num_times
            row["bytes"] += num_times * kernel.num_bytes
            row["flops"] += num_times * kernel.flops
            row["seconds"] += num_times * kernel_seconds(kernel, cluster)
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def headline(report: dict[str, Any]) -> str:
    """Return lines with the size of the model and its peak memory; with a cluster, also if it fits, and its speed."""
    peak = sum(report["peak_bytes"][DEVICE].values())
    lines = [
        f"{count(report['parameters'])} parameters on {report['world_size']} ranks "
        f"({report['data_size']} data x {report['tensor_size']} tensor)",
        f"peak {num_bytes(peak)} per device",
    ]
    if "cluster" in report:
        cluster = ClusterSpec(**report["cluster"])
        available = cluster.usable_gpu_bytes
        verdict = "fits" if report["fits"] else f"does NOT fit, by {(peak - available) / 1e9:,.2f} GB,"
        step, on_host, of_host = report["step"], report["node_host_bytes"] / 1e9, cluster.host_memory_gb
        host_fits = "fits" if report["fits_host"] else f"does NOT fit, by {on_host - of_host:,.0f} GB,"
        host = [f"{on_host:,.1f} GB on a node's host: {host_fits} its {of_host:,.0f} GB"] if on_host >= 0.05 else []
        lines[-1] += f": {verdict} the {available / 1e9:,.2f} GB of {cluster.name},"
        lines += [
            f"beside {cluster.reserved_gb:g} GB for CUDA and NCCL",
            *host,
            f"projected step {seconds(step['seconds'])}, {step['hardware_tflops_per_device']:.1f} TFLOPs per device, "
            f"MFU {100 * step['mfu']:.1f}%{cluster.remark}",
        ]
    return "\n".join(lines)


def work_on_matrices(update: MatrixUpdate) -> dict[str, Any]:
    """Return how the updates of matrices are divided over the ranks that share the optimizer's states."""
    flops, sent = update.assignment.all_flops, update.sent_numels()
    return {
        "number": len(update.matrices),
        "idle_ranks": flops.count(0),
        # Of a rank, in means over the ranks.
        "most_work": max(flops) * len(flops) / sum(flops),
        "most_sent": max(sent) * len(sent) / (sum(sent) or 1),
        "mean_sent_numel": sum(sent) / len(sent),
    }


def matrices_line(matrices: dict[str, Any]) -> str:
    """Return how evenly the ranks that share the optimizer's states divide the computation of matrices."""
    number, idle, work, sent = (matrices[name] for name in ("number", "idle_ranks", "most_work", "most_sent"))
    return (
        f"{number} matrices are updated whole: the rank with most work has {work:.2f} times the mean, and {idle} ranks "
        f"have none; the rank that sends most of them sends {sent:.2f} times the mean of "
        f"{count(matrices['mean_sent_numel'])} elements a step"
    )


def memory_table(report: dict[str, Any]) -> Table:
    columns = [report[what][where] for where in (DEVICE, HOST) for what in ("resident_bytes", "peak_bytes")]
    size, unit = unit_of(max(sum(column.values()) for column in columns))
    figures = right_aligned("device, resident", "device, peak", "host, resident", "host, peak")
    table = Table("", *figures, title=f"Memory of this rank, {unit}", title_justify="left")
    for kind in TensorKind:
        if any(kind in column for column in columns):
            table.add_row(kind, *(f"{column.get(kind, 0) / size:,.3f}" for column in columns))
    table.add_section()
    table.add_row("total", *(f"{sum(column.values()) / size:,.3f}" for column in columns))
    return table


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the format of chrome://tracing and Perfetto, whose times are microseconds."""
    same = {"ph": "X", "pid": "projected step"}
    return {
        "traceEvents": [
            same | {"name": one.name, "tid": one.lane, "ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6}
            for one in timeline.tasks
        ]
    }
