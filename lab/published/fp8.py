"""Write the figures of docs/published/fp8.md: throughputs of H100 to GB300 in bf16, FP8 and FP4, and their predictions.

    python -m lab.published.fp8

Dry runs are kept in runs/published: the first time takes half an hour, later ones some minutes.
"""

from collections.abc import Sequence

from lab.measure.fit import Constants
from lab.pages.markdown import table, write_blocks
from lab.published.calibrate import CALIBRATED, LATE_FITS, calibrated
from lab.published.predict import NUM_JOBS, Prediction, record_all
from lab.published.reproduce import constants_lines, error_lines, row_lines, variants_of
from lab.published.rows import LATE_ROWS, ROOT, Row, read_rows

PAGE = ROOT / "docs/published/fp8.md"


def ratio_lines(found: Sequence[Prediction]) -> list[str]:
    """Return the table of the speed in FP8, over that in bf16, of H100 that were measured with both."""
    pairs: dict[tuple[object, ...], dict[str, Prediction]] = {}
    for one in found:
        row = one.row
        run = row.source.split()[0], row.layers, row.hidden, row.gpus, row.seq, row.tp, row.compiled, row.async_tp
        if row.gpu == "H100" and not row.doubt:
            pairs.setdefault(run, {}).setdefault(row.gemm_precision, one)
    lines = []
    for pair in (pair for pair in pairs.values() if "bf16" in pair):
        half = pair.pop("bf16")
        for one in pair.values():
            published = one.row.published_tflops / half.row.published_tflops
            predicted = one.tflops / half.tflops
            ratios = f"{published:.3f}", f"{predicted:.3f}", f"{predicted / published - 1:+.1%}"
            lines.append([one.row.id, half.row.id, *ratios])
    return table(["row", "of", "published", "predicted", "error"], lines)


def blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    before = {name: value for fit in LATE_FITS.values() for name, value in fit.before.items()}
    fitted_sources = {row.source for row in rows if row.id in CALIBRATED}

    def without(row: Row) -> Constants:
        """Return all constants, fitted without the rows of the row's source, if there are such."""
        if row.source not in fitted_sources:
            return {}
        return {name: value for gpu in LATE_FITS for name, value in calibrated(gpu, row.source).items()}

    variants = variants_of(rows, lambda row: before, without)
    return {
        "errors": error_lines(variants, ["GPU", "products"], lambda row: (row.gpu, row.gemm_precision)),
        "constants": constants_lines({gpu: calibrated(gpu) for gpu in LATE_FITS}),
        "ratios": ratio_lines(variants["fitted"]),
        "rows": row_lines(variants, doubt=0),
        "doubt": row_lines(variants, doubt=1),
    }


def main() -> None:
    rows = read_rows(LATE_ROWS)
    record_all(rows, NUM_JOBS)
    write_blocks(PAGE, blocks(rows))


if __name__ == "__main__":
    main()
