"""Writes docs/settings.md from the tree of settings: `python -m lab.settings_page`."""

from collections.abc import Iterable
from pathlib import Path

from gpt.settings.help import default_text, sections, summary
from gpt.settings.parser import TREE
from gpt.settings.tree import Group, Leaf
from parallel.fields import describe

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
PAGE_HEAD = """# Settings

Every setting of a training run, with the values that it accepts and its default. On the command line, a setting is an
option, such as `--zero.stage 3`; in a YAML file, it is written below its group, as in `zero: {stage: 3}`.
[training.md](training.md) says which of several files and options wins. `python -m lab.settings_page` writes this
page from the dataclasses that the program reads.
"""


def page(tree: Iterable[Group | Leaf]) -> str:
    """Return a page in Markdown with a table for each group of settings."""
    lines = [PAGE_HEAD]
    for group, leaves in sections(tree):
        lines += [f"## {group.name}", "", summary(group), ""]
        if group.is_optional:
            lines += [f"The group `{group.name}` is `null` by default: it is not used.", ""]
        lines += ["| setting | meaning | values | default |", "| --- | --- | --- | --- |"]
        for leaf in leaves:
            default = default_text(leaf).removeprefix("default: ")
            cells = (
                f"`{leaf.name}`",
                leaf.text,
                describe(leaf.hint),
                default if default == "required" else f"`{default}`",
            )
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(TREE))
