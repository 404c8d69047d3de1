"""The pages of the documents, and the programs and commands in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.source_files import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its first line of text."""

    page: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """Return the commands of a block of bash, with their continuation lines; lines of comments are left out."""
        lines = re.sub(r" *\\\n *", " ", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(str(page.relative_to(ROOT)), line, found[1], found[2])


def inline_commands(page: Path) -> Iterator[str]:
    """Yield what stands in backquotes inside of sentences and tables, and begins as a command of this project does."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for found in re.findall(r"`([^`]+)`", text):
        if re.match(r"(python|torchrun|bash|sbatch|scripts/\S+\.(sh|sbatch)|--[a-z_]+\.[a-z_]+) ", found):
            yield found.replace("\n", " ")
