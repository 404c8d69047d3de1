"""Write the figures of docs/paper/README.md and its plots: what dry runs predict for the paper's tables and figures.

    python -m lab.paper.reproduce                     writes the page and all plots
    python -m lab.paper.reproduce figure2 table1      prints these parts, writes their plots, and leaves the page

Each configuration is run dry at two depths and extrapolated to its own (lab/planner/depth.py). Dry runs are kept in
runs/paper/dry. Runs on a real cluster are read from runs/paper/FIGURE/NAME and get a column of their own.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial

from lab.pages.markdown import table, with_blocks
from lab.paper import claims, fragments, memory, throughput
from lab.paper.experiments import PAPER
from lab.paper.results import Part
from parallel.validation.errors import exit_on_config_error

PARTS: dict[str, Callable[[], Part]] = {
    "table1": memory.table_1,
    "table2": memory.table_2,
    "figure1": memory.figure_1,
    "figure2": partial(throughput.against_size, "figure2", "Figure 2: throughput against model size"),
    "figure3": throughput.figure_3,
    "figure4": partial(throughput.against_size, "figure4", "Figure 4: without tensor parallelism, 128 GPUs"),
    "figure5": throughput.figure_5,
    "figure6": memory.figure_6,
    "figure7": memory.figure_7,
    "figure8": throughput.figure_8,
    "section6": fragments.section_6,
    "section9": claims.section_9,
    "sentences": claims.claims,
}
PAGE = PAPER / "README.md"


def page(found: Mapping[str, Part]) -> str:
    statuses = [(" ".join(re.findall("[a-z]+|[0-9]", name)).capitalize(), part[0]) for name, part in found.items()]
    blocks = {"statuses": table(["part of the paper", "status"], statuses), "accuracy": list(throughput.accuracy())}
    return with_blocks(PAGE.read_text(), blocks | {name: lines for name, (_, lines) in found.items()})


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.paper.reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to print: {', '.join(PARTS)}")
    names = parser.parse_args(arguments).parts
    if unknown := sorted(set(names) - set(PARTS)):
        parser.exit(2, f"error: {', '.join(unknown)} is no part of the page; choose from {', '.join(PARTS)}\n")
    for name in names:
        status, lines = PARTS[name]()
        print("\n".join([f"\n## {name}\n", f"{status}\n", *lines]))
    if not names:
        PAGE.write_text(page({name: part() for name, part in PARTS.items()}))
        print(PAGE)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
