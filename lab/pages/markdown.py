"""Pages of Markdown of which people write the prose, and commands write blocks of figures.

<!-- NAME -->
lines of a command
<!-- /NAME -->
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    return [_row(headings), "|" + " --- |" * len(headings), *map(_row, rows)]


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def projected_here(cluster: str = "") -> str:
    """Return a line that says when and where figures were projected."""
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU."
    return f"Projected{cluster and f' on {cluster}'} on {date.today()}: {where}"


def write_blocks(path: Path, blocks: Mapping[str, Iterable[str]]) -> None:
    """Write the named blocks of a page, and print its path."""
    path.write_text(with_blocks(path.read_text(), blocks))
    print(path)


def with_blocks(page: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """Return the page with the lines of each named block replaced."""
    for name, lines in blocks.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert begin, f"the page has no block {name}"
        assert end, f"the block {name} has no end"
        page = "\n".join([before + begin, *lines, "", end + after])
    return page
