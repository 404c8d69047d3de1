"""Write docs/published/README.md: published throughputs, and what dry runs predict for them.

    python -m lab.published.reproduce

Recordings of dry runs are kept in runs/published: the first time takes minutes, later ones a minute.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lab.measure.cluster import ClusterSpec
from lab.published.calibrate import CALIBRATED, FITS, Constants, calibrated, fitted, with_constants
from lab.published.effects import EFFECTS, Effect
from lab.published.predict import NUM_JOBS, record_all
from lab.published.predictions import Prediction, cluster_of, predict
from lab.published.rows import ROOT, Row, read_rows
from lab.published.sources import gpu_type, program_of

PAGE = ROOT / "docs/published/README.md"
WITHIN = 0.12
CARDS = 8  # of a node of a DGX A100

INTRODUCTION = """# Published throughputs, by dry runs

Throughputs on V100, A100 and H100 that others have published, and what dry runs of this project predict for them
before anything runs on a GPU. `bash scripts/published/reproduce.sh` writes this page. The rows are in
`configs/published/rows.csv`, and their configurations beside it. [planner.md](planner.md) compares the layouts of eight
rows with what the planner finds for them. Any other rows in the same columns are predicted by

```bash
python -m lab.published.predict my-rows.csv --output runs/predicted.csv
```

A row's step is recorded at two shallow depths and with at most two micro-batches, as the planner does
(`lab/planner/depth.py`), and projected on the file of its cluster in `configs/clusters`, with the network that the row
states. What the measured program did differently from this one is in `lab/published/sources.py`.

| column | meaning |
| --- | --- |
| `node_gbps` | Gb/s of all network cards of a node |
| `stage`, `tp` | stage of ZeRO, and tensor size; FSDP's FULL_SHARD is stage 3, SHARD_GRAD_OP stage 2 |
| `basis` | the count of FLOPs of a step of B sequences, below |
| `doubt` | 1: the micro-batch is not published, states were offloaded, or `notes` say why the figure fits no other |

| basis | FLOPs |
| --- | --- |
| `F96` | 96 B s L h^2 (1 + s/6h + V/16Lh), recomputation included |
| `8P` | 8 x parameters x tokens |
| `6P+12Lhs` | (6 x parameters + 12 L h s) x tokens |
| `F72full` | 72 B s L h^2 (1 + s/6h + V/12Lh) |
"""

CALIBRATION = """
## What is fitted

At most three constants for each type of GPU, by `python -m lab.published.calibrate`, to the rows that are named
here and no others. They start at published measurements, which the column "before" of the tables uses. All other
figures are in the cluster files, each with its source. The effects and the programs of the sources were chosen with
the disclosed rows known, so their errors are those of few constants in a suitable form, and not of a blind prediction.
"Without its source" predicts a row with constants that are fitted without any row of the row's source; H100, of which
no other source is fitted, then has the ratios of fitted to published values that A100 has.
"""

EFFECTS_TEXT = """
## Effects

Each effect is a figure of a cluster file or a property of a program that can be left out. A row counts as moved if its
time changes by more than 0.5%. An effect that makes the error smaller only before the constants are fitted again could
as well be a constant: it stays where physics asks for it, because other shapes need it.
"""

DOUBT = """
## Rows with doubt

They are predicted as the others are, and are in no sum. The rows of ZeRO-3 in Megatron-LM's paper (SC 2021, table 2)
contradict rows of the same size: 175B with stage 3 reached 173 to 186 TFLOPs on 256 A100 with FSDP, and 204 with
offload and short sequences. Their time grows with the number of GPUs although the work of each shrinks, as if
collectives, and not computation, took the step. With a ring over one of a node's eight cards, as DeepSpeed's other rows
suggest too, the projection comes near them; the table says which rate of that card would give the published figure:
"""


def errors(found: Sequence[Prediction]) -> list[float]:
    return [one.error for one in found if not one.row.doubt]


def median_abs(values: Sequence[float]) -> float:
    return statistics.median(abs(value) for value in values)


def largest_of(values: Sequence[float]) -> float:
    return max(values, key=abs)


def by_source(found: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    groups: dict[str, list[Prediction]] = {}
    for one in found:
        groups.setdefault(one.row.source, []).append(one)
    return groups


def mean_of_medians(found: Sequence[Prediction]) -> float:
    """Return the mean of the median errors of the sources."""
    return statistics.mean(median_abs(errors(group)) for group in by_source(found).values() if errors(group))


def predictions_with(rows: Sequence[Row], constants_of: Callable[[Row], Constants]) -> list[Prediction]:
    return [predict(row, with_constants(cluster_of(row), constants_of(row))) for row in rows]


def summary_lines(variants: dict[str, list[Prediction]]) -> Iterator[str]:
    """Yield a line for each way of prediction, and the table of errors by source."""
    fitted_rows = variants["fitted"]
    unseen = [one for one in fitted_rows if one.row.id not in CALIBRATED]
    yield title_line("Fitted", fitted_rows)
    yield title_line("Fitted, without the rows that were fitted", unseen)
    yield title_line("Before fitting", variants["before"])
    yield title_line("Without a row's own source", variants["without"]) + "\n"
    sources = [source for source, found in by_source(variants["fitted"]).items() if errors(found)]
    yield "| source | rows | median error | signed | largest | before fitting | without its source |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for source in sources:
        own = {name: errors(by_source(found)[source]) for name, found in variants.items()}
        median, signed, largest = (f(own["fitted"]) for f in (median_abs, statistics.median, largest_of))
        others = f"{median_abs(own['before']):.1%} | {median_abs(own['without']):.1%}"
        yield f"| {source} | {len(own['fitted'])} | {median:.1%} | {signed:+.1%} | {largest:+.1%} | {others} |"


def title_line(title: str, found: Sequence[Prediction]) -> str:
    own = errors(found)
    share = sum(abs(value) <= WITHIN for value in own) / len(own)
    return (
        f"- {title}: median error {median_abs(own):.1%}, signed {statistics.median(own):+.1%}, {share:.0%} of "
        f"{len(own)} rows within {WITHIN:.0%}, mean of the sources' medians {mean_of_medians(found):.1%}."
    )


def row_lines(variants: dict[str, list[Prediction]], doubt: int) -> Iterator[str]:
    yield "| row | published | predicted | error | before | without its source | peak, GB | fits |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    triples = zip(variants["fitted"], variants["before"], variants["without"], strict=True)
    for one, before, without in triples:
        if one.row.doubt == doubt:
            note, fits = " (fitted)" if one.row.id in CALIBRATED else "", "yes" if one.fits else "no"
            yield (
                f"| {one.row.id} | {one.row.published_tflops:g} | {one.tflops:.1f} | {one.error:+.1%}{note} "
                f"| {before.error:+.1%} | {without.error:+.1%} | {one.peak_bytes / 1e9:.1f} | {fits} |"
            )


def constants_lines(found: dict[str, Constants]) -> Iterator[str]:
    yield "\n| GPU | constant | before | fitted | rows |\n| --- | --- | --- | --- | --- |"
    for gpu, constants in found.items():
        rows = ", ".join(FITS[gpu].rows)
        for name, value in constants.items():
            yield f"| {gpu} | `{name}` | {FITS[gpu].before[name]:g} | {value:.3f} | {rows} |"
            rows = ""


def effect_lines(rows: Sequence[Row], base: Sequence[Prediction]) -> Iterator[str]:
    """Yield the table of effects: the error without each one, with the same constants and with newly fitted ones."""
    known = [row for row in rows if not row.doubt]
    reference = {one.row.id: one.seconds for one in base}
    yield "| effect | source | rows it moves by 0.5% | median error without it | and fitted again | mean of sources |"
    yield "| --- | --- | --- | --- | --- | --- |"
    total = f"{median_abs(errors(base)):.1%}"
    yield f"| all effects | | | {total} | {total} | {mean_of_medians(base):.1%} |"
    for effect in EFFECTS:
        print(f"without: {effect.name}", flush=True)
        same = [predict_without(effect, row, {}) for row in known]
        moved = sum(abs(one.seconds / reference[one.row.id] - 1) > 0.005 for one in same)
        constants = {gpu: refitted(effect, gpu) for gpu in FITS}
        again = [predict_without(effect, row, constants[gpu_type(row)]) for row in known]
        medians = f"{median_abs(errors(same)):.1%} | {median_abs(errors(again)):.1%} | {mean_of_medians(again):.1%}"
        yield f"| {effect.name} | {effect.source} | {moved} of {len(known)} | {medians} |"


def predict_without(effect: Effect, row: Row, constants: Constants) -> Prediction:
    cluster, program = effect.without(with_constants(cluster_of(row), constants), program_of(row))
    return predict(row, cluster, program)


def refitted(effect: Effect, gpu: str) -> Constants:
    """Return the constants of a type of GPU that are fitted without an effect."""
    by_id = {row.id: row for row in read_rows()}
    before = {name: value for name, value in FITS[gpu].before.items() if name not in effect.cluster}
    rows = [by_id[name] for name in FITS[gpu].rows]
    return fitted(before, rows, lambda row, constants: predict_without(effect, row, constants))


def network_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rate of the network with which each row of the ZeRO-3 table would have its published figure."""
    yield "\n| row | published | predicted | one card, Gb/s | it would need |\n| --- | --- | --- | --- | --- |"
    for row in rows:
        if row.source.startswith("ZeRO-3"):
            found, needed = predict(row), needed_gbps(row)
            line = f"| {row.id} | {row.published_tflops:g} | {found.tflops:.1f} "
            yield f"{line}| {row.node_gbps / CARDS:g} | {needed / CARDS:.0f} |"


def needed_gbps(row: Row) -> float:
    """Return the rate of a node's network at which the projection gives the published figure, by bisection."""
    low, high = row.node_gbps / 1024, row.node_gbps
    for _ in range(12):
        middle = math.sqrt(low * high)
        cluster: ClusterSpec = cluster_of(replace(row, node_gbps=middle))
        low, high = (low, middle) if predict(row, cluster).error > 0 else (middle, high)
    return math.sqrt(low * high)


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    found = {gpu: calibrated(gpu) for gpu in FITS}
    without = {(gpu, source): calibrated(gpu, source) for gpu in FITS for source in {row.source for row in rows}}
    variants = {
        "fitted": [predict(row) for row in rows],
        "before": predictions_with(rows, lambda row: FITS[gpu_type(row)].before),
        "without": predictions_with(rows, lambda row: without[gpu_type(row), row.source]),
    }
    lines = [INTRODUCTION, "## Errors\n", *summary_lines(variants), CALIBRATION, *constants_lines(found)]
    lines += [EFFECTS_TEXT, *effect_lines(rows, variants["fitted"])]
    lines += ["\n## Rows\n", *row_lines(variants, doubt=0)]
    lines += [DOUBT, *network_lines(rows), "", *row_lines(variants, doubt=1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = read_rows()
    record_all(rows, NUM_JOBS)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(rows))
    print(PAGE)


if __name__ == "__main__":
    main()
