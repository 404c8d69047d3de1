"""A mutant of a source file: the file with one piece of its text replaced."""

import ast
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Mutant:
    """A piece of a file, from `start` to `stop`, and the text that replaces it.

    `function` and `number` find it again if lines have moved: it is the number-th mutant in that function that deletes
    this text.
    """

    path: str
    line: int
    function: str
    deleted: str
    number: int
    start: int
    stop: int
    replacement: str

    @property
    def change(self) -> str:
        """The text before and after, in one line."""
        return f"{self.deleted} -> {' '.join(self.replacement.split()) or 'nothing'}"

    def apply(self, source: str) -> str:
        """Return the text of the mutant."""
        return source[: self.start] + self.replacement + source[self.stop :]


class SourceFile:
    """The text and the syntax tree of a file."""

    def __init__(self, path: str, source: str):
        self.path, self.source, self.tree = path, source, ast.parse(source)
        self._num_alike: dict[tuple[str, str], int] = {}

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node around another one; the module is its own parent."""
        return self._parents.get(node, self.tree)

    def text(self, node: ast.expr) -> str:
        """Return the source of a node."""
        start, stop = self._span(node)
        return self.source[start:stop]

    def mutant(self, node: ast.expr | ast.keyword | ast.stmt, replacement: str) -> Mutant:
        """Return the mutant in which other text stands for a node; an argument is deleted if the text is empty."""
        start, stop = self._span(node)
        deleted, function = " ".join(self.source[start:stop].split()), self._function(node)
        number = self._num_alike[function, deleted] = self._num_alike.get((function, deleted), -1) + 1
        if not replacement and self.source[stop] == ",":
            stop += 1
        return Mutant(self.path, node.lineno, function, deleted, number, start, stop, replacement)

    def _function(self, node: ast.AST) -> str:
        """Return the qualified name of the function around a node."""
        names: list[str] = []
        while (node := self.parent(node)) is not self.tree:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.insert(0, node.name)
        return ".".join(names)

    def _span(self, node: ast.expr | ast.keyword | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Return the position of a column, which the syntax tree counts in bytes."""
        text = self._lines[line - 1].encode()[:column].decode()
        return sum(map(len, self._lines[: line - 1])) + len(text)

    @cached_property
    def _lines(self) -> list[str]:
        return self.source.splitlines(keepends=True)

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
