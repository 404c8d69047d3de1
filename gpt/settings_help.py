"""The text of `pretrain_gpt.py --help`: every setting with its docstring, and the values that it accepts."""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING

from gpt.settings_tree import Group, Leaf
from parallel.fields import describe, shown

USAGE = "usage: pretrain_gpt.py [--config FILE] [--GROUP.SETTING VALUE] [--GROUP FILE] ..."
INDENT = " " * 8
CONFIG_TEXT = (
    "YAML file of settings, or the settings themselves as {GROUP: {SETTING: VALUE}}; may be given several times."
)


def help_text(settings: type, tree: Iterable[Group | Leaf]) -> str:
    """Return the help for a tree of settings, as wide as the terminal."""
    width = min(120, shutil.get_terminal_size().columns)
    lines = [USAGE, "", *textwrap.wrap(settings.__doc__ or "", width), "", "  --config FILE"]
    lines += _indented(CONFIG_TEXT, width)
    for node in tree:
        match node:
            case Group():
                title = f"{node.name}: {(node.kind.__doc__ or '').strip().partition(chr(10))[0]}"
                lines += ["", *textwrap.wrap(title, width)]
            case Leaf():
                lines += [f"  --{node.name}", *_indented(f"{node.text} ({_values(node)})", width)]
    return "\n".join([*lines, ""])


def _values(leaf: Leaf) -> str:
    """Return the values that a setting accepts, and its default."""
    default = "required" if leaf.default is MISSING else f"default: {shown(leaf.default)}"
    return f"{describe(leaf.hint)}; {default}"


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False, break_long_words=False
    )
