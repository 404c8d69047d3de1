"""Write the figures of docs/published/README.md: published throughputs, and what dry runs predict for them.

    python -m lab.published.reproduce

Dry runs are kept in runs/published: the first time takes minutes, later ones a minute.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from lab.measure.fit import Constants, fitted, with_constants
from lab.pages.markdown import table, write_blocks
from lab.published.calibrate import ALL_FITS, CALIBRATED, FITS, calibrated
from lab.published.predict import NUM_JOBS, Prediction, cluster_of, predict, record_all
from lab.published.rows import ROOT, Row, read_rows
from lab.published.sources import EFFECTS, gpu_type, program_of
from lab.published.sources import without as without_effect

PAGE = ROOT / "docs/published/README.md"
WITHIN = 0.12
CARDS = 8  # of a node of a DGX A100


Variants = dict[str, list[Prediction]]  # of each way of prediction: fitted, before fitting, without a row's source


def errors(found: Sequence[Prediction]) -> list[float]:
    return [one.error for one in found if not one.row.doubt]


def median_abs(values: Sequence[float]) -> float:
    return statistics.median(abs(value) for value in values)


def mean_of_medians(found: Sequence[Prediction]) -> float:
    sources = {one.row.source: None for one in found if not one.row.doubt}
    return statistics.mean(median_abs(errors([one for one in found if one.row.source == name])) for name in sources)


def variants_of(
    rows: Sequence[Row], before: Callable[[Row], Constants], without: Callable[[Row], Constants]
) -> Variants:
    """Return the predictions with the constants of cluster files, and with those before fitting or without a source."""

    def predictions_with(constants: Callable[[Row], Constants]) -> list[Prediction]:
        return [predict(row, with_constants(cluster_of(row), constants(row))) for row in rows]

    fitted = [predict(row) for row in rows]
    return {"fitted": fitted, "before": predictions_with(before), "without": predictions_with(without)}


def title_line(title: str, found: Sequence[Prediction]) -> str:
    own = errors(found)
    share = sum(abs(value) <= WITHIN for value in own) / len(own)
    return (
        f"- {title}: median error {median_abs(own):.1%}, signed {statistics.median(own):+.1%}, {share:.0%} of "
        f"{len(own)} rows within {WITHIN:.0%}, mean of the sources' medians {mean_of_medians(found):.1%}."
    )


def error_lines(variants: Variants, headings: Sequence[str], kind_of: Callable[[Row], tuple[str, ...]]) -> list[str]:
    """Return the table of errors by kind of row, of rows without doubt."""
    lines = []
    for kind in dict.fromkeys(kind_of(one.row) for one in variants["fitted"]):
        own = {name: errors([one for one in found if kind_of(one.row) == kind]) for name, found in variants.items()}
        if known := own["fitted"]:
            signed = f"{statistics.median(known):+.1%}", f"{max(known, key=abs):+.1%}"
            median, before, without = (f"{median_abs(values):.1%}" for values in own.values())
            lines.append([*kind, len(known), median, *signed, before, without])
    return table(
        [*headings, "rows", "median error", "signed", "largest", "before fitting", "without its source"], lines
    )


def row_lines(variants: Variants, doubt: int) -> list[str]:
    """Return the table of rows without or with doubt."""
    rows = []
    for one, before, without in zip(*variants.values(), strict=True):
        if one.row.doubt == doubt:
            note, fits = " (fitted)" if one.row.id in CALIBRATED else "", "yes" if one.fits else "no"
            found = one.row.id, f"{one.row.published_tflops:g}", f"{one.tflops:.1f}", f"{one.error:+.1%}{note}"
            rows.append([*found, f"{before.error:+.1%}", f"{without.error:+.1%}", f"{one.peak_bytes / 1e9:.1f}", fits])
    headings = "row", "published", "predicted", "error", "before", "without its source", "peak, GB", "fits"
    return table(headings, rows)


def constants_lines(found: dict[str, Constants]) -> list[str]:
    """Return the table of constants; the first row of a type of GPU names the rows to which they are fitted."""
    fits = {gpu: ALL_FITS[gpu] for gpu in found}
    rows = [
        (gpu, f"`{name}`", f"{fits[gpu].before[name]:g}", f"{value:.3f}", "" if number else ", ".join(fits[gpu].rows))
        for gpu, constants in found.items()
        for number, (name, value) in enumerate(constants.items())
    ]
    return table(["GPU", "constant", "before", "fitted", "rows"], rows)


def effect_lines(rows: Sequence[Row], base: Sequence[Prediction]) -> list[str]:
    """Return the table of effects: the error without each one, with the same constants and with newly fitted ones."""
    known = [row for row in rows if not row.doubt]
    reference = {one.row.id: one.seconds for one in base}
    total = f"{median_abs(errors(base)):.1%}"
    lines = [["all effects", "", total, total, f"{mean_of_medians(base):.1%}"]]
    for effect in EFFECTS:
        print(f"without: {effect}", flush=True)
        same = [predict_without(effect, row, {}) for row in known]
        moved = sum(abs(one.seconds / reference[one.row.id] - 1) > 0.005 for one in same)
        constants = {gpu: refitted(effect, gpu) for gpu in FITS}
        again = [predict_without(effect, row, constants[gpu_type(row)]) for row in known]
        medians = median_abs(errors(same)), median_abs(errors(again)), mean_of_medians(again)
        lines.append([effect, f"{moved} of {len(known)}", *(f"{median:.1%}" for median in medians)])
    headings = "effect", "rows it moves by 0.5%", "median error without it", "and fitted again", "mean of sources"
    return table(headings, lines)


def predict_without(effect: str, row: Row, constants: Constants) -> Prediction:
    cluster, program = without_effect(effect, with_constants(cluster_of(row), constants), program_of(row))
    return predict(row, cluster, program)


def refitted(effect: str, gpu: str) -> Constants:
    before = {name: value for name, value in FITS[gpu].before.items() if name not in EFFECTS[effect]}
    rows = [row for row in read_rows() if row.id in FITS[gpu].rows]
    return fitted(before, lambda found: [predict_without(effect, row, found).error for row in rows])


def network_lines(rows: Sequence[Row]) -> list[str]:
    """Return the rate of the network with which each row of the ZeRO-3 table would have its published figure."""
    found = []
    for row in (row for row in rows if row.source.startswith("ZeRO-3")):
        predicted, needed = f"{predict(row).tflops:.1f}", f"{needed_gbps(row) / CARDS:.0f}"
        found.append([row.id, f"{row.published_tflops:g}", predicted, f"{row.node_gbps / CARDS:g}", needed])
    return table(["row", "published", "predicted", "one card, Gb/s", "it would need"], found)


def needed_gbps(row: Row) -> float:
    """Return the rate of a node's network at which the projection gives the published figure, by bisection."""
    low, high = row.node_gbps / 1024, row.node_gbps
    for _ in range(12):
        middle = math.sqrt(low * high)
        cluster = cluster_of(replace(row, node_gbps=middle))
        low, high = (low, middle) if predict(row, cluster).error > 0 else (middle, high)
    return math.sqrt(low * high)


def blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    variants = variants_of(
        rows, lambda row: FITS[gpu_type(row)].before, lambda row: calibrated(gpu_type(row), row.source)
    )
    titles = {
        "Fitted": variants["fitted"],
        "Fitted, without the rows that were fitted": [
            one for one in variants["fitted"] if one.row.id not in CALIBRATED
        ],
        "Before fitting": variants["before"],
        "Without a row's own source": variants["without"],
    }
    summary = [title_line(title, found) for title, found in titles.items()]
    return {
        "errors": [*summary, "", *error_lines(variants, ["source"], lambda row: (row.source,))],
        "constants": constants_lines({gpu: calibrated(gpu) for gpu in FITS}),
        "effects": effect_lines(rows, variants["fitted"]),
        "rows": row_lines(variants, doubt=0),
        "network": network_lines(rows),
        "doubt": row_lines(variants, doubt=1),
    }


def main() -> None:
    rows = read_rows()
    record_all(rows, NUM_JOBS)
    write_blocks(PAGE, blocks(rows))


if __name__ == "__main__":
    main()
