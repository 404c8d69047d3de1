"""Pages of Markdown of which people write the prose, and commands write blocks of figures.

<!-- NAME -->
lines of a command
<!-- /NAME -->
"""

from collections.abc import Iterable, Mapping, Sequence


def table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    return [_row(headings), "|" + " --- |" * len(headings), *map(_row, rows)]


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def with_blocks(page: str, blocks: Mapping[str, Iterable[str]]) -> str:
    """Return the page with the lines of each named block replaced."""
    for name, lines in blocks.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert begin, f"the page has no block {name}"
        assert end, f"the block {name} has no end"
        page = "\n".join([before + begin, *lines, "", end + after])
    return page
