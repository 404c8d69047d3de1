"""Write docs/paper/README.md and its plots: the paper's tables and figures, and what dry runs predict for them.

    python -m lab.paper.reproduce                     writes the page and all plots
    python -m lab.paper.reproduce figure2 table1      prints these parts, writes their plots, and leaves the page

Each configuration is run dry at two depths and extrapolated to its own (lab/planner/depth.py). Results are cached in
runs/paper/dry. Runs on a real cluster are read from runs/paper/FIGURE/NAME/metrics.jsonl and get a column of their own.
"""

import argparse
import sys
from collections.abc import Callable, Mapping

from lab.measure.cluster import RESERVED_BYTES
from lab.paper import memory, tables, throughput
from lab.paper.experiments import PAPER
from lab.paper.results import Part

PARTS: dict[str, tuple[str, Callable[[], Part]]] = {
    "table1": ("Table 1: model states of a GPU", tables.table_1),
    "table2": ("Table 2: the largest model, billions of parameters", tables.table_2),
    "figure1": ("Figure 1: memory of the stages", memory.figure_1),
    "figure2": ("Figure 2: throughput against model size", throughput.figure_2),
    "figure3": ("Figure 3: 60B from 64 to 400 GPUs", throughput.figure_3),
    "figure4": ("Figure 4: without tensor parallelism, 128 GPUs", throughput.figure_4),
    "figure5": ("Figure 5: Turing-NLG", throughput.figure_5),
    "figure6": ("Figure 6: the largest model under C1 to C5", memory.figure_6),
    "figure7": ("Figure 7: largest memory cached", memory.figure_7),
    "figure8": ("Figure 8: throughput under C1 to C5", throughput.figure_8),
}

RESERVED = f"{RESERVED_BYTES / 1e9:.0f}"
INTRODUCTION = f"""# The paper, by dry runs

The paper's tables and figures, as dry runs of this project predict them, beside the printed values
(`docs/paper/*.csv`). Throughput counts 8 x parameters x tokens, as the authors do.

```bash
bash scripts/paper/reproduce.sh            # runs configs/paper dry, some minutes on one core, and writes this page
bash scripts/paper/reproduce.sh table1     # prints one part, and leaves the page as it is
```

Two constants are calibrated, `gemm_fraction` and `node_fraction` in `configs/clusters/dgx-2.yaml`, by least squares
over the three marked rows of Figure 2 and no others (`python -m lab.paper.calibrate`). `memory_fraction` was
measured elsewhere. The form of the model was chosen with all rows known: communication does not overlap, a hop takes
2 us, a data-parallel ring uses one network card, products are computed in whole tiles. So the errors are those of few
constants in a suitable form, not those of a blind prediction; only Figure 3 and the 100B bars of Figure 7 had no
part in the choice. `lab/dryrun/projection.py` lists all assumptions. A run counts as out of memory (OOM) if its peak
plus {RESERVED} GB for CUDA and NCCL, which is a choice too, exceeds 32480 MiB. A line of a plot has a gap there.
"""

# Parts of the paper that need no run of their own: {name: status}.
OTHER_PARTS = {
    "Table 3": "C1 to C5 are the rows of `ZERO_CONFIGS` in `lab/paper/experiments.py`",
    "Table 4 and the appendix": "the configurations; they are the files in `configs/paper`",
}

CONTRADICTIONS = """
## Where the paper contradicts itself

- Section 6.1 gives 33 GB of checkpoints for 100B at batch 32. One input a layer takes 67 GB, one every two layers 33.6.
- Table 4 prints hidden 4096 for the models of 40B to 60B. Their sizes require 6144.
- Figure 4's "1.5B" is 34 x 1920, and its "1.38B" has 1.13B parameters by its own layers and width.
- Figures 6 and 7 disagree on what a GPU holds beside the model.
- The 40B baseline is slower than the 60B one, although it crosses fewer nodes. It is reported, but not fitted.
"""


def status_table(statuses: Mapping[str, str]) -> str:
    """Return a table with a line for each part of the paper."""
    rows = [f"| {name} | {status} |" for name, status in {**statuses, **OTHER_PARTS}.items()]
    return "\n".join(["## What is reproduced\n", "| part of the paper | status |", "| --- | --- |", *rows])


def page(found: Mapping[str, tuple[str, list[str]]]) -> str:
    """Return the page of {name of a part: (status, lines)}."""
    titles = {name: PARTS[name][0] for name in found}
    lines = [
        INTRODUCTION,
        status_table({titles[name].partition(":")[0]: status for name, (status, _) in found.items()}),
    ]
    for name, (_, part) in found.items():
        lines += [f"\n## {titles[name]}\n", *part]
    return "\n".join([*lines, "\n## Errors of all throughputs\n", *throughput.accuracy(), CONTRADICTIONS])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.paper.reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to print: {', '.join(PARTS)}")
    names = parser.parse_args(arguments).parts
    if unknown := sorted(set(names) - set(PARTS)):
        parser.exit(2, f"error: {', '.join(unknown)} is no part of the page; choose from {', '.join(PARTS)}\n")
    found: dict[str, tuple[str, list[str]]] = {}
    for name in names or PARTS:
        status, lines = PARTS[name][1]()
        found[name] = status, list(lines)
        if names:
            print("\n".join([f"\n## {PARTS[name][0]}\n", f"{status}\n", *found[name][1]]))
    if not names:
        (PAPER / "README.md").write_text(page(found))
        print(PAPER / "README.md")


if __name__ == "__main__":
    main(sys.argv[1:])
