"""Mutants by small edits, of what a programmer gets wrong: each changes one operator, constant, condition or statement.

comparison   a < b                a <= b            and the other way round; == and !=, is and is not, in and not in
arithmetic   a + b                a - b             * and //, / and *, % and //
boolean      a and b              a or b            and the other way round; not a: a
constant     1, 0.5, True         2, 2.0, False     not strings
condition    if a:                if not (a):       while and conditional expressions too
function     min(...)             max(...)          any and all too
result       return a             return None
statement    self.count(a)        pass              calls, raise, continue, break, and assignments to parts of objects

What is not run, and texts, stay: annotations, decorators, strings, the messages of errors, `__repr__`, and programs'
parsers of arguments. So does the `strict=True` of `zip`, which only asserts that lengths are equal.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from lab.races.mutants.mutant import Mutant, SourceFile

FOLDERS = ("zero", "parallel", "gpt", "data", "pretrain_gpt.py")
WITHOUT = ()

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
TEXTS = ast.JoinedStr | ast.Raise
SKIPPED_FUNCTIONS = ("__repr__", "__str__", "_parser")

TESTS = Path(__file__).resolve().parents[2] / "tests"
LEVELS = ("unit", "distributed", "end_to_end")  # the cheapest first
MOST_FILES = 8  # of tests that name what is mutated
PROGRAMS = "tests/end_to_end/test_pretrain.py", "tests/end_to_end/test_survival.py"
EQUALS = "tests/distributed/zero/test_zero_equals_one_process.py"
LAYOUTS = "tests/distributed/gpt/test_checkpoint_layouts.py"
WIDE = {
    "zero": [
        "tests/distributed/zero/scenarios",
        EQUALS,
        "tests/distributed/zero/test_zero_optimizer.py",
        LAYOUTS,
    ],
    "parallel": ["tests/distributed/gpt/test_tensor_parallel.py", EQUALS, *PROGRAMS],
    "gpt": ["tests/end_to_end/test_bad_input.py", LAYOUTS, *PROGRAMS],
    "data": ["tests/end_to_end/test_bad_input.py", *PROGRAMS],
    "pretrain_gpt": ["tests/end_to_end/test_bad_input.py", *PROGRAMS],
}


def detectors(mutant: Mutant) -> dict[str, list[str]]:
    """Return the tests that may notice a mutant: those that name it, those of its folder, and those of its package.

    A last group is the whole default suite.
    """
    folder, package = Path(mutant.path).parent, Path(mutant.path).parts[0].removesuffix(".py")
    of_folder = [file for level in LEVELS[:2] for file in sorted((TESTS / level / folder).glob("test_*.py"))]
    return {
        "near": _tests_that_name(mutant),
        "folder": [file.relative_to(TESTS.parent).as_posix() for file in of_folder],
        "package": WIDE[package],
        "suite": ["tests"],
    }


def _tests_that_name(mutant: Mutant) -> list[str]:
    """Return the test files that import the mutant's module, those of its folder first."""
    module = mutant.path.removesuffix(".py").replace("/", ".")
    names = [name for name in mutant.function.split(".") if name and not name.startswith("__")]
    found = []
    for level, folder in enumerate(LEVELS):
        for file in (TESTS / folder).rglob("test_*.py"):
            text = file.read_text()
            num_named = sum(name in text for name in names)
            if f"{module} " in text or num_named == len(names) > 0:
                is_mirror = file.parent == TESTS / folder / Path(mutant.path).parent
                found.append((level, not is_mirror, -num_named, file.relative_to(TESTS.parent).as_posix()))
    return [file for *_, file in sorted(found)[:MOST_FILES]]


def mutants(file: SourceFile) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
    yield from _below(file, file.tree)


def _below(file: SourceFile, node: ast.AST) -> Iterator[Mutant]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_skipped(child):
                yield from _of(file, child)
                if not isinstance(child, TEXTS):
                    yield from _below(file, child)


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in SKIPPED_FUNCTIONS
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).endswith(".add_argument")
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")


def _of(file: SourceFile, node: ast.AST) -> Iterator[Mutant]:
    """Yield the mutants of one node, without those of the nodes in it."""
    if isinstance(node, ast.expr):
        yield from (file.mutant(node, f"({ast.unparse(other)})") for other in _others(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield file.mutant(node.test, f"(not ({ast.unparse(node.test)}))")
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield file.mutant(node.value, "None")
    if isinstance(node, ast.stmt) and _may_be_deleted(node):
        yield file.mutant(node, "pass")


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that may stand for one by mistake."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _has_text(node):
            yield ast.BinOp(node.left, OPERATORS[type(operator)](), node.right)
        case ast.BoolOp(op=ast.And()):
            yield ast.BoolOp(ast.Or(), node.values)
        case ast.BoolOp(op=ast.Or()):
            yield ast.BoolOp(ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(4 * value if value else 1.0)
        case ast.Name(id=name) if name in FUNCTIONS:
            yield ast.Name(FUNCTIONS[name])


def _has_text(node: ast.BinOp) -> bool:
    """Return whether an operator joins, repeats or formats text."""
    sides = [getattr(side, "value", side) for side in (node.left, node.right)]
    return any(isinstance(side, str | ast.JoinedStr) for side in sides)


def _may_be_deleted(statement: ast.stmt) -> bool:
    """Return whether the code without a statement has no name that is not defined."""
    match statement:
        case ast.Expr(value=value):
            return isinstance(value, ast.Call)
        case ast.Assign(targets=[target]):
            return isinstance(target, ast.Attribute | ast.Subscript)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
