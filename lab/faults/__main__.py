"""Check that whatever happens to a run, it goes on with the same losses, or ends with a reason of one line.

    python -m lab.faults --rounds 100             each round injects one fault of `FAULTS`, in turn
    python -m lab.faults --faults kill --rounds 9
    python -m lab.faults --first 17 --rounds 1    round 17 of the same seed again

Exits with 1 if any round had a traceback, a hang, an abort, other losses, or a fault that was not named.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.faults.faults import FAULTS, Outcome, Round, WrongError
from lab.faults.runs import Steps, prepare_corpus, start


def undisturbed_in(folder: Path) -> Callable[[Mapping[str, object], int], Steps]:
    """Return the function of settings and ranks that runs them undisturbed, once for all rounds with that training."""
    found: dict[str, Steps] = {}

    def steps_of(settings: Mapping[str, object], num_ranks: int) -> Steps:
        training = {k: v for k, v in settings.items() if not k.startswith(("checkpoint.", "run.", "guard."))}
        key = json.dumps([num_ranks, training], default=str)
        if key not in found:
            found[key] = start(training, folder / f"undisturbed-{len(found)}", num_ranks=num_ranks).run_to_end()
        return found[key]

    return steps_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to continue an earlier series")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="only these, in turn")
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.faults}
    console = Console()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        corpus, undisturbed = prepare_corpus(folder), undisturbed_in(folder)
        for number in range(options.first, options.first + options.rounds):
            fault = options.faults[number % len(options.faults)]
            of_round = folder / f"round-{number}"
            of_round.mkdir()
            this = Round(random.Random(f"{options.seed} {number}"), of_round, corpus, undisturbed)
            begin = time.perf_counter()
            outcome = run_round(fault, this)
            outcomes[fault].append(outcome)
            said = f"{outcome.verdict}: {outcome.detail}, {time.perf_counter() - begin:.0f} s"
            console.print(f"{number:>4} {fault}: {said}", markup=False, highlight=False, soft_wrap=True)
    console.print(table(outcomes))
    return int(any(outcome.is_wrong for of_fault in outcomes.values() for outcome in of_fault))


def run_round(fault: str, this: Round) -> Outcome:
    try:
        return FAULTS[fault](this)
    except WrongError as error:
        verdict, _, detail = str(error).partition(": ")
        return Outcome(verdict, detail, is_wrong=True)


def table(outcomes: Mapping[str, list[Outcome]]) -> Table:
    """Return a table with a row for each fault, and the number of each of its verdicts."""
    rows = Table("fault", "rounds", "verdicts", "wrong")
    for fault, found in outcomes.items():
        verdicts = Counter(outcome.verdict for outcome in found)
        listed = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        rows.add_row(fault, str(len(found)), listed, str(sum(outcome.is_wrong for outcome in found)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
