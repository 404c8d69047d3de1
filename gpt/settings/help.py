"""Every setting with its docstring and its values: the text of `pretrain_gpt.py --help`."""

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING

from gpt.settings.tree import Group, Leaf
from parallel.fields import describe, shown

USAGE = "usage: pretrain_gpt.py [--config FILE] [--GROUP.SETTING VALUE] [--GROUP FILE]..."
INDENT = " " * 8
CONFIG_TEXT = (
    "YAML file of settings, or the settings themselves as {GROUP: {SETTING: VALUE}}; may be given several times."
)


def help_text(settings: type, tree: Iterable[Group | Leaf]) -> str:
    """Return the help for a tree of settings, as wide as the terminal."""
    width = min(120, shutil.get_terminal_size().columns)
    lines = [USAGE, "", *textwrap.wrap(settings.__doc__ or "", width), "", "  --config FILE"]
    lines += _indented(CONFIG_TEXT, width)
    for group, leaves in sections(tree):
        lines += ["", *textwrap.wrap(f"{group.name}: {summary(group)}", width)]
        for leaf in leaves:
            lines += [
                f"  --{leaf.name}",
                *_indented(f"{leaf.text} ({describe(leaf.hint)}; {default_text(leaf)})", width),
            ]
    return "\n".join([*lines, ""])


def sections(tree: Iterable[Group | Leaf]) -> list[tuple[Group, list[Leaf]]]:
    """Return each group with its own settings, in the order of the tree; those of a group inside it follow them."""
    nodes = list(tree)
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    groups = [node for node in nodes if isinstance(node, Group)]
    return [(group, [leaf for leaf in leaves if leaf.name.rpartition(".")[0] == group.name]) for group in groups]


def summary(group: Group) -> str:
    return (group.kind.__doc__ or "").strip().partition("\n")[0]


def default_text(leaf: Leaf) -> str:
    return "required" if leaf.default is MISSING else f"default: {shown(leaf.default)}"


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False, break_long_words=False
    )
