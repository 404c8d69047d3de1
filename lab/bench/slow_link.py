"""Compare tensor parallelism inside nodes with tensor parallelism across nodes, on links of several rates.

python -m lab.bench.slow_link --output docs/results/slow_link

Two nodes of two ranks run on one machine (lab/faults/testbed.py), with the same model and batch at every rate of the
link. At each rate the result has the measured time of a step, and its projection from the cluster file that
lab.measure has measured at that rate.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from gpt.run_folder.files import read_steps
from lab.acceptance.child import as_options
from lab.bench.predicted import projected_seconds
from lab.faults.runs import prepare_corpus
from lab.faults.testbed import Node, joined_nodes, launch_on, testbed_problem
from lab.faults.two_nodes import start
from lab.pages.plots import plot

RATES = (None, 1000, 200)  # Mbit/s; None: not limited
NUM_RANKS, NUM_WARM_UP = 4, 2
CONFIG = Path(__file__).with_suffix(".yaml")
TOKENS = 32 * 256  # of a step
INSIDE, ACROSS = "tensor inside, ZeRO across", "tensor across nodes"
LAYOUTS: dict[str, dict[str, object]] = {
    INSIDE: {"parallel.tensor_size": 2},
    ACROSS: {"parallel.tensor_size": 4, "parallel.tensor_across_nodes": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="prefix of OUTPUT.json and OUTPUT.png")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    if reason := testbed_problem():
        sys.exit(f"skipped: {reason}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"config": CONFIG, "data.path": prepare_corpus(folder), "train.steps": options.steps}
        for rate in RATES:
            with joined_nodes(mbit_per_second=rate) as nodes:
                rows.append(measure(nodes, settings, rate, folder / str(rate)))
                print(json.dumps(rows[-1]))
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, options.output.with_suffix(".png"))


def measure(nodes: list[Node], settings: dict[str, object], rate: int | None, folder: Path) -> dict:
    """Return the seconds of a step of each layout, measured and projected, and the cluster file that was measured."""
    folder.mkdir()
    cluster = folder / "cluster.yaml"
    launch_on(nodes, NUM_RANKS // len(nodes), "lab.measure", "--write", str(cluster))
    row: dict = {"mbit_per_second": rate, "measured": {}, "projected": {}, "cluster": cluster.read_text()}
    for layout, more in LAYOUTS.items():
        run_dir = folder / layout.replace(" ", "-").replace(",", "")
        start(nodes, settings | more, run_dir).run_to_end()
        records = read_steps(run_dir)[NUM_WARM_UP:]
        row["measured"][layout] = median(TOKENS / record["tokens_per_second"] for record in records)
        row["projected"][layout] = projected_seconds(as_options(settings | more), NUM_RANKS, cluster)
    return row


def draw(rows: list[dict], path: Path) -> None:
    names = [
        "not limited" if row["mbit_per_second"] is None else f"{row['mbit_per_second'] / 1000:g} Gbit/s" for row in rows
    ]
    with plot(path, 2, (9, 4)) as (left, right):
        for layout, colour in zip(LAYOUTS, ("tab:blue", "tab:red"), strict=True):
            left.plot(names, [row["measured"][layout] for row in rows], "o-", color=colour, label=layout)
            projected = [row["projected"][layout] for row in rows]
            left.plot(names, projected, "x--", color=colour, label=f"{layout}, projected")
        for what, style in (("measured", "o-"), ("projected", "x--")):
            right.plot(names, [row[what][ACROSS] / row[what][INSIDE] for row in rows], style, color="black", label=what)
        for axes, quantity in ((left, "seconds a step"), (right, "tensor across nodes / tensor inside")):
            axes.set(xlabel="link between the nodes", ylabel=quantity, ylim=(0, None))


if __name__ == "__main__":
    main()
