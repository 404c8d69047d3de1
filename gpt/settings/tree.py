"""The tree of settings: its groups, which are dataclasses, and its leaves, with types, defaults and docstrings.

They make the text of `pretrain_gpt.py --help`, and the page docs/settings.md.
"""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any

from parallel.validation.fields import alternatives, describe, field_types, shown

USAGE = "usage: pretrain_gpt.py [--config FILE] [--GROUP.SETTING VALUE] [--GROUP FILE]..."
INDENT = " " * 8
CONFIG_TEXT = (
    "YAML file of settings, or the settings themselves as {GROUP: {SETTING: VALUE}}; may be given several times."
)


@dataclass(frozen=True)
class Group:
    """A group of settings. `is_optional`: it may be null, such as train.ramp_up."""

    name: str
    kind: type
    is_optional: bool


@dataclass(frozen=True)
class Leaf:
    """A setting. `hint` is its type with its range; `default` is MISSING if it has to be set."""

    name: str
    hint: Any
    default: Any
    text: str


def walk(kind: type, prefix: str = "", base: Any = None) -> Iterator[Group | Leaf]:
    """Yield all groups and leaves below a dataclass, in their order.

    `base` is an object of this class with the default values; None: the defaults of its fields.
    """
    texts = field_texts(kind)
    for field in fields(kind):
        hint, name, default = field_types(kind)[field.name], f"{prefix}{field.name}", default_of(field, base)
        if (below := group_of(hint)) is None:
            yield Leaf(name, hint, default, texts[field.name])
        else:
            yield Group(name, below, is_optional=below is not hint)
            yield from walk(below, f"{name}.", None if default is MISSING else default)


def group_of(hint: Any) -> type | None:
    """Return the dataclass that a type stands for, alone or as an alternative to null; None if there is none."""
    kinds = [kind for kind in alternatives(hint) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def default_of(field: Field[Any], base: Any) -> Any:
    """Return the default value of a field, which is that in `base` if this is not None; MISSING if it has none."""
    if base is not None:
        return getattr(base, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, in one line; "" if there is none."""
    texts = {field.name: "" for field in fields(kind)}
    for base in filter(is_dataclass, kind.__bases__):
        texts |= field_texts(base)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[statement.target.id] = " ".join(text.split())
    return texts


def dotted(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of the leaves of a tree of values, such as that in a file of settings."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {leaf: value for name, below in tree.items() for leaf, value in dotted(below, f"{prefix}{name}.").items()}


def help_text(settings: type, tree: Iterable[Group | Leaf]) -> str:
    """Return the help for a tree of settings, as wide as the terminal."""
    width = min(120, shutil.get_terminal_size().columns)
    lines = [USAGE, "", *textwrap.wrap(settings.__doc__ or "", width), "", "  --config FILE"]
    lines += _indented(CONFIG_TEXT, width)
    for group, leaves in sections(tree):
        lines += ["", *textwrap.wrap(f"{group.name}: {summary(group)}", width)]
        for leaf in leaves:
            lines += [
                f"  --{leaf.name}",
                *_indented(f"{leaf.text} ({describe(leaf.hint)}; {default_text(leaf)})", width),
            ]
    return "\n".join([*lines, ""])


def sections(tree: Iterable[Group | Leaf]) -> list[tuple[Group, list[Leaf]]]:
    """Return each group with its own settings, in the order of the tree; those of a group inside it follow them."""
    nodes = list(tree)
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    groups = [node for node in nodes if isinstance(node, Group)]
    return [(group, [leaf for leaf in leaves if leaf.name.rpartition(".")[0] == group.name]) for group in groups]


def summary(group: Group) -> str:
    return (group.kind.__doc__ or "").strip().partition("\n")[0]


def default_text(leaf: Leaf) -> str:
    return "required" if leaf.default is MISSING else f"default: {shown(leaf.default)}"


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False, break_long_words=False
    )
