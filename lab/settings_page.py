"""Writes docs/settings.md from the tree of settings: `python -m lab.settings_page`."""

from collections.abc import Iterable

from gpt.settings.parser import TREE
from gpt.settings.tree import Group, Leaf, default_text, sections, summary
from lab.pages.markdown import ROOT, table, with_blocks
from parallel.validation.fields import describe

PAGE = ROOT / "docs" / "settings.md"


def page(tree: Iterable[Group | Leaf]) -> str:
    lines = []
    for group, leaves in sections(tree):
        lines += [f"## {group.name}", "", summary(group), ""]
        if group.is_optional:
            lines += [f"The group `{group.name}` is `null` by default: it is not used.", ""]
        rows = []
        for leaf in leaves:
            default = default_text(leaf).removeprefix("default: ")
            shown = default if default == "required" else f"`{default}`"
            rows.append([f"`{leaf.name}`", leaf.text, describe(leaf.hint), shown])
        lines += [*table(["setting", "meaning", "values", "default"], rows), ""]
    return with_blocks(PAGE.read_text(), {"settings": lines[:-1]})


if __name__ == "__main__":
    PAGE.write_text(page(TREE))
