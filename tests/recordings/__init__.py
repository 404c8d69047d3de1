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
    file, text = RECORDINGS / f"{name}.txt", "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()) + "\n"
    if os.environ.get("RECORD"):
        file.write_text(text)
    changes = list(unified_diff(file.read_text().splitlines(), text.splitlines(), "recorded", "now", lineterm="", n=0))
    if changes:
        more = ["..."] if len(changes) > NUM_CHANGES_SHOWN else []
        raise AssertionError("\n".join([f"another output than in {file}:", *changes[:NUM_CHANGES_SHOWN], *more]))


def assert_figures_recorded(name: str, tree: Any, rel: float) -> None:
    """Compare a tree with the recording of that name: floats up to `rel`, which kernels of CPUs may round otherwise."""
    file, found = RECORDINGS / f"{name}.txt", [line.partition(" = ") for line in lines_of(tree)]
    if os.environ.get("RECORD"):
        file.write_text("".join(f"{''.join(parts)}\n" for parts in found))
    expected = [line.partition(" = ") for line in file.read_text().splitlines()]
    assert [key for key, _, _ in found] == [key for key, _, _ in expected]
    for (key, _, value), (_, _, recorded) in zip(found, expected, strict=True):
        is_close = value == recorded or math.isclose(float(value), float(recorded), rel_tol=rel)
        assert is_close, f"{key} is {value}, recorded is {recorded}"


def lines_of(tree: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each number and text in a tree of dictionaries, in the order of their keys, and lists."""
    if isinstance(tree, dict):
        for key, value in sorted((str(key), value) for key, value in tree.items()):
            yield from lines_of(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from lines_of(value, f"{path}[{number}]")
    else:
        yield f"{path} = {f'{tree:.{NUM_DIGITS}g}' if isinstance(tree, float) else tree}"
