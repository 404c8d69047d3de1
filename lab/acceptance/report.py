"""The results of an acceptance run: a table for the console, a page of Markdown, and JSON."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from rich.table import Column, Table

from lab.acceptance.figures import Figure, PartResult
from lab.acceptance.plan import Plan
from lab.pages.markdown import ROOT, table

DOCS = ROOT / "docs" / "results"
HEADINGS = "part and figures", "measured", "required", ""
VERDICTS = {True: "passed", False: "FAILED"}


def result_rows(result: PartResult) -> list[tuple[str, str, str, str]]:
    """Return the rows of a part: its own, one for its problem, and one for each of its figures."""
    rows = [(result.name, f"{result.seconds:.0f} s", "", VERDICTS[result.passed])]
    if result.problem:
        rows.append((f"  {result.problem}", "", "", VERDICTS[False]))
    return rows + [(f"  {one.what}", one.text, one.required, _verdict(one)) for one in result.figures]


def result_table(results: Sequence[PartResult]) -> Table:
    columns = [Column(h, justify="right" if h == "measured" else "left", overflow="fold") for h in HEADINGS]
    shown = Table(*columns, title="Acceptance", title_justify="left")
    for result in results:
        shown.add_section()
        for number, row in enumerate(result_rows(result)):
            shown.add_row(*row, style=None if number else "bold")
    return shown


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
    rows = []
    for result in results:
        first, *others = [[text.strip() for text in row] for row in result_rows(result)]
        rows += [[text and f"**{text}**" for text in first], *others]
    return [
        f"# Acceptance on {what}",
        "",
        f"{num_passed} of {len(results)} parts passed. [acceptance.md](../acceptance.md) says what they do and how to "
        f"read the figures, which `{data}` has too.",
        "",
        *table(["", ""], facts.items()),
        "",
        *table(HEADINGS, rows),
    ]


def _verdict(figure: Figure) -> str:
    """Return the verdict about a figure; an empty string if it is recorded only."""
    return VERDICTS[figure.passed] if figure.required or not figure.passed else ""


def _commit() -> str:
    """Return the commit that is checked out, with a + if files were changed; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
