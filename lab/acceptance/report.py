"""The results of an acceptance run: a table for the console, a page of Markdown, and JSON."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from rich.table import Table

from lab.acceptance.child import ROOT
from lab.acceptance.figures import Figure, PartResult
from lab.acceptance.plan import Plan

DOCS = ROOT / "docs" / "results"
VERDICTS = {True: "passed", False: "FAILED"}


def result_table(results: Sequence[PartResult]) -> Table:
    """Return a table with a row for each part, and below it one for each of its figures."""
    table = Table(title="Acceptance", title_justify="left")
    for heading in ("part and figures", "measured", "required", ""):
        table.add_column(heading, justify="right" if heading == "measured" else "left", overflow="fold")
    for result in results:
        table.add_section()
        table.add_row(result.name, f"{result.seconds:.0f} s", "", VERDICTS[result.passed], style="bold")
        if result.problem:
            table.add_row(f"  {result.problem}", "", "", VERDICTS[False])
        for figure in result.figures:
            table.add_row(f"  {figure.what}", figure.text, figure.required, _verdict(figure))
    return table


def write_results(plan: Plan, results: Sequence[PartResult], folder: Path, name: str) -> Path:
    """Write NAME.md and NAME.json to the folder, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / f"{name}.md", folder / f"{name}.json"
    parts = [asdict(result) | {"passed": result.passed} for result in results]
    facts = {"date": str(date.today()), "commit": _commit(), "ranks": plan.num_ranks, "machine": asdict(plan.machine)}
    data.write_text(json.dumps(facts | {"parts": parts}, indent=1) + "\n")
    page.write_text("\n".join(_page(plan, results, data.name)) + "\n")
    return page


def _page(plan: Plan, results: Sequence[PartResult], data: str) -> list[str]:
    machine = plan.machine
    what = f"{plan.num_ranks} x {machine.gpu}" if machine.num_gpus else f"{plan.num_ranks} ranks on CPUs"
    num_passed = sum(result.passed for result in results)
    facts = {
        "date": date.today(),
        "commit": _commit(),
        "GPUs used": f"{plan.num_ranks} of {machine.num_gpus}" if machine.num_gpus else "none",
        "memory of a GPU": f"{machine.gpu_memory_bytes / 2**30:.0f} GiB" if machine.num_gpus else "-",
        "driver": machine.driver,
        "CPU cores": machine.num_cores,
        "Python, torch, CUDA, NCCL": f"{machine.python}, {machine.torch}, {machine.cuda}, {machine.nccl}",
    }
    lines = [
        f"# Acceptance on {what}",
        "",
        f"{num_passed} of {len(results)} parts passed. [acceptance.md](../acceptance.md) says what they do and how to "
        f"read the figures, which `{data}` has too.",
        "",
        *("| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())),
        "",
        *("| part and figures | measured | required | |", "| --- | --- | --- | --- |"),
    ]
    for result in results:
        lines.append(f"| **{result.name}** | {result.seconds:.0f} s | | **{VERDICTS[result.passed]}** |")
        if result.problem:
            lines.append(f"| {_cell(result.problem)} | | | {VERDICTS[False]} |")
        lines += [f"| {_cell(f.what)} | {_cell(f.text)} | {f.required} | {_verdict(f)} |" for f in result.figures]
    return lines


def _verdict(figure: Figure) -> str:
    """Return the verdict about a figure; an empty string if it is recorded only."""
    return VERDICTS[figure.passed] if figure.required or not figure.passed else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _commit() -> str:
    """Return the commit that is checked out, with a + if files were changed; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
