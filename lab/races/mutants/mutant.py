"""A mutant of a source file: the file with one piece of its text replaced."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A piece of a file, from `start` to `stop`, and the text that replaces it."""

    path: str
    line: int
    start: int
    stop: int
    deleted: str
    replacement: str

    def apply(self, source: str) -> str:
        """Return the text of the mutant."""
        return source[: self.start] + self.replacement + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.deleted} -> {' '.join(self.replacement.split()) or 'nothing'}"


class SourceFile:
    """The text and the syntax tree of a file."""

    def __init__(self, path: str, source: str):
        self.path, self.source, self.tree = path, source, ast.parse(source)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._lines = source.splitlines(keepends=True)

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node around another one; the module is its own parent."""
        return self._parents.get(node, self.tree)

    def text(self, node: ast.expr | ast.keyword) -> str:
        """Return the source of a node."""
        start, stop = self._span(node)
        return self.source[start:stop]

    def mutant(self, node: ast.expr | ast.keyword, replacement: str) -> Mutant:
        """Return the mutant in which other text stands for a node; an argument is deleted if the text is empty."""
        start, stop = self._span(node)
        deleted = " ".join(self.text(node).split())
        if not replacement and self.source[stop] == ",":
            stop += 1
        return Mutant(self.path, node.lineno, start, stop, deleted, replacement)

    def _span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Return the position of a column, which the syntax tree counts in bytes."""
        return sum(map(len, self._lines[: line - 1])) + len(self._lines[line - 1].encode()[:column].decode())
