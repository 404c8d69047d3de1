"""Mutants without a wait: each lacks one thing that orders two streams, or the host and a stream.

statement    work.wait()                           pass
value        lambda: launch().wait()               lambda: launch()
step         Work(work.wait, ...)                  Work(lambda: None, ...)
order        first.then(launch)                    launch()
work         copied = stream.device_work()         copied = Work()
context      with stream.context():                with nullcontext():
argument     launch(..., stream=side)              launch(...)

The mutants are made on the text, so that each line keeps its number.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDERS = ("zero", "parallel", "gpt/checkpoint")
WAIT = re.compile(r"_*(wait|synchronize|landed|arrive)(_[a-z_]+)?")
WORK = re.compile(r"(device|host)_work")
CONTEXT = re.compile(r"_*(context|beside|queued)|stream")
ARGUMENT = re.compile(r"stream|beside|queued")
NO_WORK = '__import__("parallel.mesh").mesh.Work()'
NO_CONTEXT = '__import__("contextlib").nullcontext()'

FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
WITHOUT = tuple(FOUND["without"])  # files and folders
EQUIVALENT: dict[tuple[str, str], str] = {(one["path"], one["deleted"]): one["reason"] for one in FOUND["equivalent"]}
DETECTORS: dict[str, list[str]] = FOUND["detectors"]


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
        return source[: self.start] + self.replacement + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.deleted} -> {' '.join(self.replacement.split()) or 'nothing'}"


class SourceFile:
    """The text and the syntax tree of a file."""

    def __init__(self, path: str, source: str):
        self.path, self.source, self.tree = path, source, ast.parse(source)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node around another one; the module is its own parent."""
        return self._parents.get(node, self.tree)

    def text(self, node: ast.expr | ast.keyword) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def mutant(self, node: ast.expr | ast.keyword, replacement: str) -> Mutant:
        """Return the mutant in which other text stands for a node; an argument is deleted if the text is empty."""
        *before, line = self.source.splitlines(keepends=True)[: node.lineno]
        start = sum(map(len, before)) + len(line.encode()[: node.col_offset].decode())  # columns are counted in bytes
        stop, deleted = start + len(self.text(node)), " ".join(self.text(node).split())
        if not replacement and self.source[stop] == ",":
            stop += 1
        return Mutant(self.path, node.lineno, start, stop, deleted, replacement)


def mutants(file: SourceFile) -> Iterator[Mutant]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call):
            yield from _of_call(file, node)
        elif isinstance(node, ast.With):
            for item in node.items:
                if _is_call(item.context_expr, CONTEXT):
                    yield file.mutant(item.context_expr, NO_CONTEXT)


def _of_call(file: SourceFile, call: ast.Call) -> Iterator[Mutant]:
    parent = file.parent(call)
    if _is_call(call, WAIT):
        yield from _of_wait(file, call)
    elif _is_call(call, WORK) and not (isinstance(parent, ast.Attribute) and WAIT.fullmatch(parent.attr)):
        yield file.mutant(call, NO_WORK)
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "then" and len(call.args) == 1:
        yield file.mutant(call, f"({file.text(call.args[0])})()")
    if isinstance(call.func, ast.Name) and call.func.id == "Work":
        yield from (file.mutant(step, without) for step in call.args if (without := _without(file, step)))
    for keyword in call.keywords:
        if keyword.arg and ARGUMENT.fullmatch(keyword.arg):
            yield file.mutant(keyword, "")


def _of_wait(file: SourceFile, call: ast.Call) -> Iterator[Mutant]:
    """Yield the mutant without a call that waits, if nothing uses its result."""
    parent = file.parent(call)
    if isinstance(call.func, ast.Attribute) and isinstance(parent, (ast.Expr, ast.Lambda)):
        if isinstance(call.func.value, ast.Call):  # what is waited for is still launched
            yield file.mutant(call, file.text(call.func.value))
        elif call.func.attr != "wait" or not call.args:
            yield file.mutant(call, "None")


def _without(file: SourceFile, step: ast.expr) -> str:
    """Return what stands for an argument of `Work` that waits, or keeps memory allocated; "" if it does neither."""
    if isinstance(step, ast.Starred):
        return "*()"
    if isinstance(step, ast.Lambda):
        return "" if isinstance(step.body, ast.Call) else "lambda: None"  # of a call, `_of_wait` makes a mutant
    if not isinstance(step, ast.Attribute) or not WAIT.fullmatch(step.attr):
        return ""
    launched = isinstance(step.value, ast.Call)
    return f"({file.text(step.value)}, lambda: None)[1]" if launched else "lambda: None"


def _is_call(node: ast.AST, name: re.Pattern[str]) -> bool:
    """Return whether a node calls a function or a method of this name."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(name.fullmatch(called))
