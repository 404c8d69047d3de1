"""Run the acceptance of a machine: scripts/acceptance.sh calls this, and docs/acceptance.md describes it.

The parts of lab/acceptance/parts.py run one after the other. One that fails or hangs does not stop the others. The
exit code is 0 if all have passed, 1 if not, 2 if the arguments are wrong, and 130 after Ctrl-C.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data.indexed import bin_path
from lab.acceptance.child import run_child
from lab.acceptance.figures import Figure, PartResult, UnreadableResult
from lab.acceptance.long_runs import long_parts
from lab.acceptance.machine import Machine, find_machine
from lab.acceptance.parts import Part, parts
from lab.acceptance.plan import Plan
from lab.acceptance.report import DOCS, VERDICTS, result_table, write_results
from parallel.validation.errors import ConfigError

RANKS_ON_CPUS = 2


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse_plan(arguments: Sequence[str], machine: Machine) -> tuple[Plan, argparse.Namespace]:
    """Return the plan of the run and the parsed options. Exits with code 2 if an argument is wrong."""
    parser = Parser(prog="scripts/acceptance.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, help="GPUs to use (all)")
    parser.add_argument("--minutes", type=float, default=15.0, help="time for all parts but those of --long (15)")
    parser.add_argument("--long", action="store_true", help="also train GPT-2 124M beside a published loss curve")
    parser.add_argument("--data", metavar="PREFIX", help="tokens for --long: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--output", type=Path, help="empty folder for logs and results (runs/acceptance/DATE)")
    options = parser.parse_args(arguments)
    if options.gpus is not None and not 1 <= options.gpus <= machine.num_gpus:
        parser.error(f"--gpus={options.gpus}: this machine has {machine.num_gpus}; choose fewer, or leave it out")
    if options.minutes <= 0:
        parser.error(f"--minutes={options.minutes:g} is not above 0; choose 15")
    if options.long != (options.data is not None):
        parser.error("--long and --data PREFIX need each other; PREFIX is what `python -m data.prepare --output` wrote")
    if options.data and not bin_path(options.data).is_file():
        parser.error(f"--data={options.data}: {bin_path(options.data)} does not exist; prepare it with data.prepare")
    output = options.output or Path("runs/acceptance") / datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        parser.error(f"--output={output} is not an empty folder; give another")
    num_ranks = options.gpus or machine.num_gpus or RANKS_ON_CPUS
    return Plan(machine, num_ranks, output.absolute(), options.data), options


def run_parts(rows: Sequence[Part], plan: Plan, minutes: float, console: Console) -> list[PartResult]:
    """Run the parts one after the other, within so many minutes in all, and show each as it runs and ends."""
    results, deadline = [], time.monotonic() + 60 * minutes
    for number, part in enumerate(rows, start=1):
        title = f"{number} of {len(rows)}: {part.name}"
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(title, total=None)
            result = run_part(part, plan, part.limit_seconds if part.is_long else deadline - time.monotonic())
        console.print(f"{VERDICTS[result.passed]}  {title}  {result.seconds:.0f} s  {result.problem}", highlight=False)
        results.append(result)
    return results


def run_part(part: Part, plan: Plan, seconds_left: float) -> PartResult:
    """Run one part and read its result; whatever is wrong with it becomes a line of the result."""
    if seconds_left <= 0:
        return PartResult(part.name, 0.0, "was not run: the time is used up; --minutes gives more", ())
    log, start = plan.output / "logs" / f"{part.file_name}.log", time.monotonic()
    limit = min(part.limit_seconds, seconds_left)
    problem = run_child(part.command, log, limit, plan.environment | part.environment)
    seconds = time.monotonic() - start
    figures: list[Figure] = []
    try:
        figures = part.read(log)
    except (UnreadableResult, ConfigError) as error:
        problem = problem or str(error)
    except (OSError, ValueError, KeyError, IndexError) as error:
        problem = problem or f"its result cannot be read: {type(error).__name__}: {error}; see {log}"
    return PartResult(part.name, seconds, problem, tuple(figures))


def main(arguments: Sequence[str]) -> int:
    # A scheduler's or a shell's SIGTERM ends the parts as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        machine = find_machine()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    plan, options = parse_plan(arguments, machine)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    where = f"{plan.num_ranks} x {machine.gpu}" if machine.num_gpus else f"{plan.num_ranks} ranks on CPUs, tiny sizes"
    console.print(f"acceptance on {where}; logs in {plan.output}", highlight=False)
    (plan.output / "logs").mkdir(parents=True)
    try:
        plan.write_synthetic_data()
        rows = [*parts(plan), *(long_parts(plan) if options.long else [])]
        results = run_parts(rows, plan, options.minutes, console)
    except KeyboardInterrupt:
        console.print("interrupted: the running part was stopped, and nothing was written")
        return 130
    console.print(result_table(results))
    is_elsewhere = options.output is not None or not machine.num_gpus
    folder, name = (plan.output, "results") if is_elsewhere else (DOCS, machine.slug)
    page = write_results(plan, results, folder, name)
    num_passed = sum(result.passed for result in results)
    console.print(f"{num_passed} of {len(results)} parts passed; {page} has the results", highlight=False)
    return 0 if num_passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
