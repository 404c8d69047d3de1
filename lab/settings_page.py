"""Writes docs/settings.md from the tree of settings: `python -m lab.settings_page`."""

from pathlib import Path

from gpt.settings.help import page
from gpt.settings.parser import TREE

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

if __name__ == "__main__":
    PAGE.write_text(page(TREE))
