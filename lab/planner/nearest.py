"""The published rows nearest to a plan, with the errors of their projections, from the pages in docs/published."""

import csv
import re
from collections.abc import Iterator
from functools import cache
from math import log2

from gpt.settings.settings import Settings
from lab.measure.cluster import ClusterSpec
from lab.pages.markdown import ROOT

PAGES = {"rows": "README", "fp8_rows": "fp8"}  # {file of rows in configs/published: page in docs/published}
# | row | published | predicted | error | before | without its source | ...
ROW = re.compile(r"^\| (\S+) \| [\d.]+ \| [\d.]+ \| (\S+)[^|]*\| \S+ \| (\S+) \|", re.MULTILINE)
NUM_SHOWN = 3
PEAKS = {"V100": 125, "A100": 312, "H100": 989, "H200": 989, "B200": 2250, "GB200": 2450, "GB300": 2450}  # half TFLOPs


@cache
def published_rows() -> list[dict[str, str]]:
    """Return the rows without doubt that the pages predict, each with `error` and `without`."""
    found = []
    for file, page in PAGES.items():
        text = (ROOT / f"docs/published/{page}.md").read_text()
        errors = {name: {"error": error, "without": without} for name, error, without in ROW.findall(text)}
        with (ROOT / f"configs/published/{file}.csv").open() as lines:
            found += [row | errors[row["id"]] for row in csv.DictReader(lines) if row["id"] in errors]
    return [row for row in found if row["doubt"] == "0"]


def nearest_lines(settings: Settings, cluster: ClusterSpec, world_size: int) -> Iterator[str]:
    """Yield the rows on the same type of GPU that are nearest in size, GPUs and sequence, and what none of them has."""
    model, is_fp8 = settings.model, settings.train.matmul is not None
    rows = [row for row in published_rows() if PEAKS[row["gpu"]] == cluster.peak_half_tflops]
    if not rows:
        yield f"no published row is on GPUs of {cluster.name}: the error of its times is unknown"
        return

    def distance(row: dict[str, str]) -> float:
        size = int(row["layers"]) * int(row["hidden"]) ** 2, int(row["gpus"]), int(row["seq"])
        own = model.num_layers * model.hidden_size**2, world_size, model.seq_length
        other_products = row.get("gemm_precision", "").startswith("fp8") is not is_fp8
        return other_products + sum(abs(log2(a / b)) for a, b in zip(size, own, strict=True))

    yield "the nearest published rows, with the error of their projection, and without any row of their source:"
    for row in sorted(rows, key=distance)[:NUM_SHOWN]:
        yield f"  {row['id']} ({row['seq']} tokens): {row['error']}, {row['without']}"
    longest = max(int(row["seq"]) for row in rows)
    if model.seq_length > longest:
        yield f"  none has more than {longest} tokens: the error at model.seq_length={model.seq_length} is unknown"
