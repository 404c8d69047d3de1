"""The numbers in constants, and in defaults of functions, settings and classes, are as recorded.

Few tests depend on the size of a buffer, a limit of time or a width, so none would see a slip of the finger there.
"""

import ast
from collections.abc import Iterator

from tests.recordings import assert_recorded
from tests.source_files import Module, all_modules

PRODUCT = "zero", "parallel", "gpt", "data"


class WithoutTexts(ast.NodeTransformer):
    """Replaces texts of several words, which have tests of their own, by empty ones."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")


def has_numbers(node: ast.AST) -> bool:
    constants = (child.value for child in ast.walk(node) if isinstance(child, ast.Constant))
    return any(isinstance(value, int | float) for value in constants)


def values_in(node: ast.AST, path: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) of the constants and the defaults in a module, a class or a function."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        yield f"{path} {ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)}", node.value
    elif isinstance(node, ast.FunctionDef):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
        pairs = [
            *zip(named, arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        yield from ((f"{path} {node.name}({name.arg})", default) for name, default in pairs if default is not None)
    if isinstance(node, ast.Module | ast.ClassDef):
        inside = f"{path} {node.name}:" if isinstance(node, ast.ClassDef) else path
        for child in node.body:
            yield from values_in(child, inside)


def constants_of(module: Module) -> Iterator[str]:
    """Yield a line for each constant, and each default, with a number."""
    for name, value in values_in(ast.parse(module.source), f"{module.path}:"):
        if has_numbers(value):
            yield f"{name} = {ast.unparse(WithoutTexts().visit(value))}"


def test_constants_and_defaults_are_as_recorded():
    modules = sorted((module for module in all_modules() if module.package in PRODUCT), key=lambda module: module.path)
    assert_recorded("constants", *(line for module in modules for line in constants_of(module)))
