"""The source files of the repository as syntax trees, for the tests that check rules on the source itself."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("parallel", "data", "zero", "gpt", "lab", "tests")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the repository root."""

    path: PurePosixPath
    source: str

    @property
    def package(self) -> str:
        return self.path.with_suffix("").parts[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def nodes(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        return [node for node in self._nodes if isinstance(node, kinds)]

    @cached_property
    def imports(self) -> list[tuple[int, str, str]]:
        """Every import as (line, name in this file, imported name), those inside functions included."""
        found = [(node.lineno, a.asname or a.name, a.name) for node in self.nodes(ast.Import) for a in node.names]
        for node in self.nodes(ast.ImportFrom):
            # `from .x import y` in a/b/c.py is `from a.b.x import y`
            parents = self.path.parent.parts[: len(self.path.parent.parts) + 1 - node.level] if node.level else ()
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, a.asname or a.name, f"{origin}.{a.name}") for a in node.names]
        return found

    @cached_property
    def used_names(self) -> list[tuple[int, str]]:
        """Every dotted use of an imported name as (line, full name), such as (7, "torch.distributed.barrier")."""
        imported = defaultdict(set)  # first word -> (name in this file, imported name)
        for _, local, origin in self.imports:
            imported[local.partition(".")[0]].add((local, origin))
        found = []
        for node in self.nodes(ast.Attribute, ast.Name):
            name = _dotted_name(node)
            for local, origin in imported[name.partition(".")[0]]:
                if name == local or name.startswith(f"{local}."):
                    found.append((node.lineno, origin + name.removeprefix(local)))
        return found

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Yield (line of its owner, docstring) of the module and of every class and function that has one."""
        for node in self.nodes(Documented):
            if docstring := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), docstring


def _dotted_name(node: ast.AST) -> str:
    """Return "a.b.c" also for "a.b(x)[0].c", and "" for attributes of anything that has no name."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute() if origin := _dotted_name(node.value):
            return f"{origin}.{node.attr}"
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _dotted_name(inner)
    return ""


def all_modules() -> list[Module]:
    """Return every Python file of the packages, and those in the repository root."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    paths += sorted(ROOT.glob("*.py"))
    return [Module(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text()) for path in paths]


def imported_files(modules: list[Module]) -> dict[str, set[str]]:
    """Return {path: paths of the files that it imports}; every import counts, wherever it stands."""
    known = {_dotted(module.path): str(module.path) for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        found = {_file_of(origin, known) for _, _, origin in module.imports}
        graph[str(module.path)] = {path for path in found if path is not None}
    return graph


def _dotted(path: PurePosixPath) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _file_of(origin: str, known: dict[str, str]) -> str | None:
    """Return the file that an imported name is from: the longest known module that the name begins with."""
    while origin:
        if origin in known:
            return known[origin]
        origin = origin.rpartition(".")[0]
    return None
