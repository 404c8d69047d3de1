"""The constants of modules and the defaults of functions, settings and classes are as recorded.

Few tests depend on the size of a buffer, a limit of time or a width, so none would see a slip of the finger there.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tests.recordings import assert_recorded
from tests.source_files import Module, all_modules

PLAIN = int | float | str | bytes | bool | None | range | torch.dtype | Enum | re.Pattern
MOST_CHARACTERS = 30  # of a text, which have tests of their own
PRODUCT = "zero", "parallel", "gpt", "data"
OF_THIS_MACHINE = ("FOREIGN ",)  # paths of packages


def text_of(value: Any) -> str:
    """Return a value as text; of what has no values but behaviour, the name of its type."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(text_of(getattr(value, f.name)) for f in fields(value))})"
    if isinstance(value, str):
        return repr(value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}...")
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__.replace("<lambda>", "lambda")
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


def defaults_of(function: Callable) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the parameters with a default."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            yield parameter.name, parameter.default


def assigned_names(source: Module) -> set[str]:
    """Return the names of upper-case letters that a module assigns, and does not import."""
    statements = [node for node in ast.parse(source.source).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in statements for target in getattr(node, "targets", [getattr(node, "target", None)])]
    names = (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
    return {name for name in names if name.isupper()}


def constants_of(module: ModuleType, own_names: set[str]) -> Iterator[str]:
    """Yield a line for each constant, and each default, that a module defines."""
    for name, value in vars(module).items():
        if name in own_names:
            yield f"{name} = {text_of(value)}"
        elif getattr(value, "__module__", None) != module.__name__:
            continue
        elif inspect.isfunction(value):
            yield from (f"{name}({key}={text_of(default)})" for key, default in defaults_of(value))
        elif isinstance(value, type) and not issubclass(value, Exception | Enum):
            yield from (f"{name}.{key} = {text_of(item)}" for key, item in class_values(value))


def class_values(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a class's own attributes, fields, and defaults of its methods."""
    if is_dataclass(owner):
        yield from ((field.name, field.default) for field in fields(owner) if isinstance(field.default, PLAIN | tuple))
    for name, value in vars(owner).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            if name != "__init__" or not is_dataclass(owner):
                yield from ((f"{name}({key})", default) for key, default in defaults_of(function))
        elif not name.startswith("_") and not is_dataclass(owner) and isinstance(value, PLAIN | tuple | dict):
            yield name, value


def test_constants_and_defaults_are_as_recorded():
    lines = []
    for source in sorted(all_modules(), key=lambda module: module.path):
        if source.package in PRODUCT and source.path.name != "__main__.py":
            name = ".".join(source.path.with_suffix("").parts).removesuffix(".__init__")
            found = sorted(constants_of(import_module(name), assigned_names(source)))
            lines += [f"{name}: {line}" for line in found if not line.startswith(OF_THIS_MACHINE)]
    assert_recorded("constants", *lines)
