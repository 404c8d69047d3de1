"""The rules of the architecture, checked on the source itself; each rule is first shown a file that breaks it."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Who may import whom, beside itself. Nobody imports tests, and only tests import scripts.
MAY_IMPORT = {
    "parallel": set(),
    "data": set(),
    "zero": {"parallel"},
    "gpt": {"parallel", "zero", "data"},
    "pretrain_gpt": {"parallel", "zero", "data", "gpt"},
    "scripts": {"parallel", "zero", "data", "gpt", "pretrain_gpt"},
    "tests": {"parallel", "zero", "data", "gpt", "pretrain_gpt", "scripts"},
}
PRODUCT = {"parallel", "data", "zero", "gpt", "pretrain_gpt"}

COLLECTIVES = re.compile(r"(all_|reduce|broadcast|gather|scatter|(monitored_)?barrier|i?send|i?recv|batch_isend)")
ENVIRONMENT_FILES = {
    PurePosixPath("parallel/world.py"),  # reads what the launcher set
    PurePosixPath("data/encode.py"),  # sets the switch of the tokenizers library, which has no other
}
PICKLING_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the repository root."""

    path: PurePosixPath
    source: str

    @property
    def package(self) -> str:
        return self.path.with_suffix("").parts[0]

    def nodes(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        return [node for node in ast.walk(ast.parse(self.source, str(self.path))) if isinstance(node, kinds)]

    def imported_names(self) -> dict[str, str]:
        """Every import as {name in this file: what it stands for}, such as {"dist": "torch.distributed"}."""
        names = {}
        for node in self.nodes(ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
        for node in self.nodes(ast.ImportFrom):
            # `from .x import y` in a/b/c.py is `from a.b.x import y`
            parents = self.path.parent.parts[: len(self.path.parent.parts) + 1 - node.level] if node.level else ()
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                names[alias.asname or alias.name] = f"{origin}.{alias.name}"
        return names

    def used_names(self) -> Iterator[tuple[int, str]]:
        """(line, full name) of every dotted use of an imported name, such as (7, "torch.distributed.all_reduce")."""
        imported = self.imported_names()
        for node in self.nodes(ast.Attribute, ast.Name):
            name = ast.unparse(node)
            for local, origin in imported.items():
                if name == local or name.startswith(f"{local}."):
                    yield node.lineno, origin + name.removeprefix(local)


Rule = Callable[[Module], Iterator[str]]


def imports_follow_the_arrows(module: Module) -> Iterator[str]:
    allowed = MAY_IMPORT[module.package] | {module.package}
    if module.path == PurePosixPath("gpt/model/transformer.py"):
        allowed = {"parallel"}  # the model is a single-device program: it knows its layers and nothing of ZeRO
    for origin in module.imported_names().values():
        package = origin.split(".")[0]
        if package in MAY_IMPORT and package not in allowed:
            yield f"imports {origin}"


def collectives_go_through_one_door(module: Module) -> Iterator[str]:
    if module.package not in PRODUCT - {"parallel"}:
        return
    for line, name in module.used_names():
        package, _, function = name.rpartition(".")
        if package.startswith("torch.distributed") and COLLECTIVES.match(function):
            yield f"line {line} calls {name}; use an Axis"


def the_environment_is_read_in_one_file(module: Module) -> Iterator[str]:
    if module.package not in PRODUCT or module.path in ENVIRONMENT_FILES:
        return
    for line, name in module.used_names():
        if name.startswith(("os.environ", "os.getenv", "os.putenv")):
            yield f"line {line} uses {name}"


def no_file_is_unpickled(module: Module) -> Iterator[str]:
    """A pickle runs code when it is read: files hold tensors and JSON."""
    if module.package not in PRODUCT:
        return
    for origin in module.imported_names().values():
        if origin.split(".")[0] in PICKLING_MODULES:
            yield f"imports {origin}"
    for keyword in module.nodes(ast.keyword):
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if (keyword.arg == "weights_only" and not is_true) or (keyword.arg == "allow_pickle" and is_true):
            yield f"line {keyword.value.lineno} allows pickles by {keyword.arg}"


def there_is_no_global_statement(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.Global):
        yield f"line {node.lineno} makes {', '.join(node.names)} global"


def every_module_says_what_it_is(module: Module) -> Iterator[str]:
    if module.source.strip() and not ast.get_docstring(ast.parse(module.source)):
        yield "has no docstring"


BREACHES = [
    (imports_follow_the_arrows, "parallel/mesh.py", "from zero.stage import STAGES"),
    (imports_follow_the_arrows, "data/batches.py", "import parallel.mesh"),
    (imports_follow_the_arrows, "zero/engine.py", "def f():\n    from gpt import model"),
    (imports_follow_the_arrows, "gpt/model/transformer.py", "from zero import ZeroConfig"),
    (imports_follow_the_arrows, "gpt/model/transformer.py", "from .trainer import train"),
    (imports_follow_the_arrows, "gpt/trainer.py", "import tests.ranks"),
    (imports_follow_the_arrows, "pretrain_gpt.py", "from scripts import bench"),
    (imports_follow_the_arrows, "scripts/bench/step.py", "from tests import models"),
    (collectives_go_through_one_door, "zero/engine.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_go_through_one_door, "gpt/trainer.py", "import torch\ntorch.distributed.barrier()"),
    (collectives_go_through_one_door, "gpt/trainer.py", "from torch import distributed as d\nd.broadcast(x, 0)"),
    (collectives_go_through_one_door, "data/a.py", "from torch.distributed import all_gather as g\ng(x, y)"),
    (the_environment_is_read_in_one_file, "parallel/mesh.py", "import os\nos.environ['RANK']"),
    (the_environment_is_read_in_one_file, "gpt/trainer.py", "from os import getenv\ngetenv('RANK')"),
    (no_file_is_unpickled, "gpt/checkpoint/checkpoint.py", "import pickle"),
    (no_file_is_unpickled, "gpt/checkpoint/checkpoint.py", "torch.load(path, weights_only=False)"),
    (no_file_is_unpickled, "data/indexed.py", "np.load(path, allow_pickle=True)"),
    (there_is_no_global_statement, "gpt/trainer.py", "def f():\n    global step\n    step = 1"),
    (every_module_says_what_it_is, "gpt/trainer.py", "import torch"),
]
ALLOWED = [
    (imports_follow_the_arrows, "gpt/trainer.py", "import torch\nfrom zero import stage\nfrom .model import GPT"),
    (imports_follow_the_arrows, "tests/unit/test_a.py", "from scripts import bench\nfrom tests.ranks import run_ranks"),
    (collectives_go_through_one_door, "parallel/mesh.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_go_through_one_door, "zero/engine.py", "import torch\naxis.all_reduce(x, out=x)\ntorch.all(x)"),
    (the_environment_is_read_in_one_file, "parallel/world.py", "import os\nos.environ['RANK']"),
    (no_file_is_unpickled, "gpt/checkpoint/checkpoint.py", "torch.load(path, weights_only=True)"),
    (every_module_says_what_it_is, "zero/__init__.py", ""),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREACHES))


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    paths = [path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")] + list(ROOT.glob("*.py"))
    modules = [Module(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text()) for path in paths]
    assert {module.package for module in modules} >= {"parallel", "data", "zero", "gpt", "tests"}
    return modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_obeys(rule: Rule, modules: list[Module]):
    assert [f"{module.path} {breach}" for module in modules for breach in rule(module)] == []


@pytest.mark.parametrize(("rule", "path", "source"), BREACHES)
def test_a_breach_is_noticed(rule: Rule, path: str, source: str):
    assert len(list(rule(Module(PurePosixPath(path), source)))) == 1


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED)
def test_what_is_allowed_passes(rule: Rule, path: str, source: str):
    assert list(rule(Module(PurePosixPath(path), source))) == []


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_the_web_toolkit_named_apex_is_not_required(name: str):
    requirement = re.compile(r'^\s*"?apex\b', re.MULTILINE)
    assert requirement.search('torch\n    "apex>=0.9",')
    assert not requirement.search((ROOT / name).read_text())


def test_a_rank_starts_without_what_it_may_never_use():
    """A thousand ranks read from one file system what each of them imports."""
    script = "import pretrain_gpt, sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    rarely_used = ["transformers", "matplotlib", "wandb", "datasets", "tensorboard"]
    result = subprocess.run([sys.executable, "-c", script, *rarely_used], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
