"""Outputs that are recorded in files, so that a change of any line or number of them is seen.

RECORD=1 scripts/test.sh -k recorded    records what the code says now: read the difference before you commit it
"""

import math
import os
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).parent
NUM_DIGITS = 6
NUM_CHANGES_SHOWN = 40  # lines


def assert_recorded(name: str, *parts: str) -> None:
    """Compare texts, one after another, with the recording of that name."""
    lines = [line.rstrip() for line in "\n".join(parts).splitlines()]
    changes = list(unified_diff(_recorded(name, lines), lines, "recorded", "now", lineterm="", n=0))
    if changes:
        more = ["..."] if len(changes) > NUM_CHANGES_SHOWN else []
        raise AssertionError("\n".join([f"another output than in {name}.txt:", *changes[:NUM_CHANGES_SHOWN], *more]))


def assert_figures_recorded(name: str, tree: Any, rel: float) -> None:
    """Compare a tree with the recording of that name: floats up to `rel`, which kernels of CPUs may round otherwise."""
    lines = list(lines_of(tree))
    for now, recorded in zip(lines, _recorded(name, lines), strict=True):
        pairs = zip(now.split(), recorded.split(), strict=True)
        assert all(a == b or math.isclose(_number(a), _number(b), rel_tol=rel) for a, b in pairs), (
            f"{now} != {recorded}"
        )


def _recorded(name: str, lines: list[str]) -> list[str]:
    """Return the lines of the recording of that name, which are `lines` if they are being recorded."""
    file = RECORDINGS / f"{name}.txt"
    if os.environ.get("RECORD"):
        file.write_text("\n".join(lines) + "\n")
    return file.read_text().splitlines()


def _number(word: str) -> float:
    try:
        return float(word.rstrip(","))
    except ValueError:
        return math.nan


def lines_of(tree: Any, path: str = "") -> Iterator[str]:
    """Yield lines for the numbers and texts in a tree of dictionaries, in the order of their keys, and lists.

    A list of numbers or texts is one line, and so is a dictionary of these in a list.
    """
    if isinstance(tree, dict):
        items = sorted((str(key), value) for key, value in tree.items())
        if path.endswith("]") and all(_is_flat(value) for _, value in items):
            yield f"{path}: {', '.join(f'{key} {_shown(value)}' for key, value in items)}"
        else:
            for key, value in items:
                yield from lines_of(value, f"{path}.{key}" if path else key)
    elif _is_flat(tree):
        yield f"{path} = {_shown(tree)}"
    else:
        for number, value in enumerate(tree):
            yield from lines_of(value, f"{path}[{number}]")


def _is_flat(value: Any) -> bool:
    """Return whether a value is a number or a text, or a list of these."""
    items = value if isinstance(value, list | tuple) else [value]
    return not any(isinstance(item, dict | list | tuple) for item in items)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(_shown, value))}]"
    return f"{value:.{NUM_DIGITS}g}" if isinstance(value, float) else f"{value}"
