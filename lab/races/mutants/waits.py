"""Mutants without a wait: each lacks one thing that orders two streams, or the host and a stream.

statement    handle.wait()                         pass
value        lambda: launch().wait()               lambda: launch()
step         Handle(work.wait, ...)                Handle(lambda: None, ...)
order        first.then(launch)                    launch()
handle       copied = stream.device_handle()       copied = Handle()
context      with stream.context():                with nullcontext():
argument     launch(..., stream=side)              launch(...)

The mutants are made on the text, so that each line keeps its number.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

FOLDERS = ("zero", "parallel", "gpt/checkpoint")
# Here the host waits for other processes, or for a measurement to end, and not for a stream; or waits are simulated.
WITHOUT = (
    "parallel/host_barrier.py",
    "parallel/comm_log.py",
    "parallel/launch/",
    "parallel/stopping.py",
    "parallel/watchdog.py",
    "zero/state/checkpoint.py",
    "zero/state/writer.py",
)
WAIT = re.compile(r"_*(wait|synchronize|landed|arrive)(_[a-z_]+)?")
HANDLE = re.compile(r"(device|host)_handle")
CONTEXT = re.compile(r"_*(context|beside|queued)|stream")
ARGUMENT = re.compile(r"stream|beside|queued")
NO_HANDLE = '__import__("parallel.mesh").mesh.Handle()'
NO_CONTEXT = '__import__("contextlib").nullcontext()'

# {(path, deleted text): the reason why the mutant is as right as the code}
EQUIVALENT = {
    ("zero/activations/stores.py", "fetched.then(lambda: self._replicas.all_gather(part, out=whole))"): (
        "every store below returns a complete handle: the side stream orders the copy before the gather"
    ),
    ("zero/step/matrix_updates.py", "self._offload.to_host(on_accelerator, out=on_host).wait()"): (
        "the host waits for all copies right after it, and the message is freed later"
    ),
}

EQUALS = "tests/distributed/zero/test_zero_equals_one_process.py"
DETECTORS = {  # groups of tests, the cheapest first
    "deferred": ["tests/distributed/deferred/test_reports.py", "tests/distributed/deferred"],
    "checker": [
        "tests/unit/lab/races/test_stream_checker.py",
        "tests/unit/zero/memory/test_placement.py",
        "tests/distributed/lab/test_streams.py",
    ],
    "order": ["tests/distributed/lab/test_launch_order.py", "tests/distributed/zero/test_overlapped_gathers.py"],
    # What runs only on gloo, at once: its own gather and scatter, and a reduction between groups behind another. And
    # layers without the engine: a loss of several chunks, and sums of gradients by hooks.
    "gloo": [
        "tests/distributed/parallel/test_axis.py",
        "tests/distributed/parallel/test_linear_cross_entropy.py",
        "tests/distributed/parallel/test_tensor_layers.py",
        "tests/distributed/gpt/test_saver.py::test_settings_are_compared_over_both_axes",
        f"{EQUALS}::test_sharding_inside_groups_and_replicating_across_equals_one_process",
    ],
}


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


def mutants(file: SourceFile) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
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
    elif _is_call(call, HANDLE) and not (isinstance(parent, ast.Attribute) and WAIT.fullmatch(parent.attr)):
        yield file.mutant(call, NO_HANDLE)
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "then" and len(call.args) == 1:
        yield file.mutant(call, f"({file.text(call.args[0])})()")
    if isinstance(call.func, ast.Name) and call.func.id == "Handle":
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
    """Return what stands for an argument of `Handle` that waits, or keeps memory allocated; "" if it does neither."""
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
