"""The rules of the architecture, checked on the source itself; each rule is first shown a source that breaks it."""

import ast
import gc
import graphlib
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path, PurePosixPath
from unittest import mock

import pytest

from gpt.settings.settings import Settings
from tests.programs import start_forked, wait_for_end
from tests.source_files import PACKAGES, ROOT, Module, all_modules, imported_files

# What each room may import beside itself and GROUND, from the lowest floor to the highest: only rooms above it in this
# table. PACKAGE/* is a package with its rooms.
# fmt: off
FLOORS = {
    "parallel/validation":  "",  # GROUND

    "data":                 "",

    "parallel":             "",
    "parallel/tensor":      "parallel",
    "parallel/launch":      "parallel",

    "zero/core/partition":  "parallel",
    "zero/core/memory":     "parallel",
    "zero/core/protocols":  "parallel zero/core/partition zero/core/memory",
    "zero/core/buckets":    "parallel zero/core/partition zero/core/memory zero/core/protocols",
    "zero/core/units":      "parallel zero/core/partition zero/core/memory zero/core/protocols zero/core/buckets",
    "zero/core/step":       "parallel parallel/tensor zero/core/partition zero/core/memory zero/core/protocols "
                            "zero/core/buckets",
    "zero/core":            "parallel parallel/tensor zero/core/partition zero/core/memory zero/core/protocols "
                            "zero/core/buckets zero/core/units zero/core/step",

    "zero/any_module":      "parallel zero/core/buckets",
    "zero/fp8":             "parallel parallel/tensor zero/core/partition",
    "zero/formulas":        "zero/core/partition",
    "zero/activations":     "parallel parallel/tensor zero/core/memory",
    "zero/extensions":      "parallel zero/core zero/core/*",
    "zero/transports":      "parallel zero/core/partition zero/core/memory zero/core/protocols zero/core/buckets "
                            "zero/core/step zero/fp8",
    "zero/homes":           "parallel zero/core/partition zero/core/memory zero/core/protocols",
    "zero/settings":        "parallel zero/core/partition",
    "zero/homes/budget":    "parallel zero/settings zero/core zero/core/*",
    "zero/updates":         "parallel parallel/tensor zero/core/partition zero/core/protocols zero/core/buckets "
                            "zero/core/step",
    "zero/checkpoint/state_dicts": "parallel zero/core zero/core/*",
    "zero":                 "parallel parallel/tensor zero/core zero/core/* zero/settings zero/extensions zero/fp8 "
                            "zero/any_module zero/transports zero/homes zero/homes/budget zero/updates "
                            "zero/checkpoint/state_dicts",
    "zero/checkpoint":      "parallel parallel/tensor zero zero/core zero/core/* zero/settings zero/formulas "
                            "zero/updates",
    "zero/checkpoint/folders": "parallel zero zero/core zero/core/* zero/checkpoint",

    "gpt/formats":          "",
    "gpt/shape":            "parallel parallel/tensor",
    "gpt/kernels":          "parallel gpt/shape",
    "gpt/model":            "parallel parallel/tensor gpt/shape gpt/kernels",
    "gpt/deepspeed":        "parallel gpt/formats",
    "gpt/run_folder":       "parallel data",
    "gpt/families":         "parallel zero/checkpoint gpt/shape",
    "gpt/pretrained":       "parallel parallel/tensor data zero/checkpoint gpt/shape gpt/model gpt/families",
    "gpt/settings":         "parallel zero/* gpt/formats gpt/shape gpt/deepspeed gpt/pretrained",
    "gpt/builder":            "parallel parallel/tensor zero/* gpt/shape gpt/kernels gpt/model gpt/settings "
                            "gpt/pretrained",
    "gpt/checkpoint":       "parallel data zero/* gpt/shape gpt/run_folder gpt/settings gpt/families gpt/pretrained "
                            "gpt/builder",
    "gpt/monitor":          "parallel parallel/tensor zero/* gpt/formats gpt/shape gpt/model gpt/run_folder "
                            "gpt/settings gpt/builder",
    "gpt":                  "parallel parallel/tensor parallel/launch data zero/* gpt/shape gpt/kernels gpt/model "
                            "gpt/run_folder gpt/settings gpt/pretrained gpt/builder gpt/checkpoint gpt/monitor",
    "pretrain_gpt.py":      "parallel data zero/* gpt/*",

    "lab/observe":          "parallel",
    "lab/pages":            "",
    "lab/races/mutants":    "",
    "lab/races":            "parallel gpt/monitor lab/observe pretrain_gpt.py",
    "lab/measure":          "parallel parallel/launch gpt/formats lab/observe",
    "lab/dryrun/costs":     "parallel lab/observe lab/measure",
    "lab/dryrun":           "PRODUCT lab/pages lab/observe lab/races lab/measure lab/dryrun/costs",
    "lab/planner":          "PRODUCT lab/pages lab/observe lab/measure lab/dryrun lab/dryrun/costs",
    "lab/acceptance":       "PRODUCT lab/pages lab/measure",
    "lab/faults":           "PRODUCT lab/acceptance",
    "lab/bench":            "PRODUCT lab/pages lab/measure",
    "lab/compare_commits":  "parallel parallel/launch lab/pages lab/bench",
    "lab/paper":            "PRODUCT lab/pages lab/observe lab/measure lab/dryrun lab/planner",
    "lab/published":        "PRODUCT lab/pages lab/measure lab/dryrun lab/dryrun/costs lab/planner",
    "lab":                  "PRODUCT lab/pages lab/dryrun lab/bench",

    "tests":                "PRODUCT lab/*",
}
# fmt: on
# The public interface.
FLOORS_OF_FILES = {"zero/__init__.py": "parallel zero/*", "zero/activations/__init__.py": "zero/*"}
GROUND = "parallel/validation"  # errors, and the values that settings accept
PRODUCT = {"parallel", "data", "zero", "gpt", "pretrain_gpt"}

MOST_MODULES, MOST_LINES = 16, 50  # of a folder, beside __init__.py; of a function
ONE_FILE_EACH = {"gpt/families"}  # folders of things of one kind, of any number
COLLECTIVES = re.compile(r"(all_|reduce|broadcast|gather|scatter|(monitored_)?barrier|i?send|i?recv|batch_isend)")
COLLECTIVE_FILES = {
    "parallel/pairwise.py",  # the collectives of an Axis for gloo
    "parallel/mesh.py",  # an Axis: every collective of a training run goes through it, and is recorded there
    "lab/measure/bandwidth.py",  # measures torch's own calls, without the Axis around them
}
ENVIRONMENT_FILES = {
    "parallel/world.py",  # reads what the launcher set
    "parallel/launch/elastic.py",  # is a launcher: sets what its ranks read
    "data/encode.py",  # sets the switch of the tokenizers library, which has no other
}
PRIVATE_PART = re.compile(r"torch\.(.*\.)?_[a-zA-Z]")
TORCH_INTERNALS = {
    "parallel/torch_internals.py",
    "parallel/autograd_internals.py",
    "zero/checkpoint/state_dicts/chunked_tensor.py",  # follows the protocol of DTensor
    "lab/observe/torch_internals.py",
    "lab/observe/inductor_internals.py",
    "lab/compare_commits/child.py",  # runs in any commit, whose own list may be elsewhere
    "lab/bench/step_time.py",  # sets how often dynamo compiles a block
}
# The name of a group and an option, or a group before a name that is formatted; `model.accumulate()` is a call.
OPTION = re.compile(rf"\b({'|'.join(field.name for field in fields(Settings))})\.([a-z_]+\b(?!\()|$)")
UNPICKLING_FILE = "zero/checkpoint/folders/safe_reader.py"  # of a list of classes
PICKLING_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
HEADLESS = {"What", "Of", "Where", "Whether", "For", "In", "Who", "How", "Which", "As"}

Rule = Callable[..., Iterator[str]]  # of a module, or of a list of them


def imports_follow_the_arrows(module: Module) -> Iterator[str]:
    arrows = FLOORS | FLOORS_OF_FILES
    room = _longest(str(module.path), arrows)
    if module.package in PRODUCT | {"lab"} and room not in {str(module.path), str(module.path.parent)}:
        yield f"is in {module.path.parent}, which is not a room"
    allowed = {room, GROUND} | {name for names in arrows[room].split() for name in _expanded(names)}
    for line, _, origin in module.imports:
        target = _longest(origin.replace(".", "/"), allowed | FLOORS.keys())
        if target and target not in allowed:
            yield f"line {line} imports {origin}"


def _expanded(names: str) -> set[str]:
    if names == "PRODUCT":
        return {room for room in FLOORS if room.split("/")[0].removesuffix(".py") in PRODUCT}
    package = names.removesuffix("/*")
    return {names} if package == names else {room for room in FLOORS if f"{room}/".startswith(f"{package}/")}


def _longest(path: str, names: Iterable[str]) -> str:
    """Return the longest name that `path` is or lies under, "" if there is none; the .py of a file may be absent."""
    path = path.removesuffix(".py")
    return max((name for name in names if f"{path}/".startswith(f"{name.removesuffix('.py')}/")), key=len, default="")


def collectives_are_called_in_few_files(module: Module) -> Iterator[str]:
    if module.package not in PRODUCT or str(module.path) in COLLECTIVE_FILES:
        return
    for line, name in module.used_names:
        package, _, function = name.rpartition(".")
        if package.startswith("torch.distributed") and COLLECTIVES.match(function):
            yield f"line {line} calls {name}; use an Axis"


def private_parts_of_torch_are_named_in_few_files(module: Module) -> Iterator[str]:
    """A new version of torch may change them: what there is to check then stands in a few lists of imports."""
    if module.package not in PRODUCT | {"lab"} or str(module.path) in TORCH_INTERNALS:
        return
    imported = {origin: line for line, _, origin in module.imports if PRIVATE_PART.match(origin)}
    lines = set(imported.values())
    lines |= {line for line, name in module.used_names if PRIVATE_PART.match(name) and name not in imported}
    for line in sorted(lines):
        yield f"line {line} names a private part of torch"


def the_environment_is_read_in_one_file(module: Module) -> Iterator[str]:
    if module.package not in PRODUCT or str(module.path) in ENVIRONMENT_FILES:
        return
    for line, name in module.used_names:
        if name.startswith(("os.environ", "os.getenv", "os.putenv")):
            yield f"line {line} uses {name}"


def processes_are_ended_in_one_file(module: Module) -> Iterator[str]:
    for line, name in module.used_names if module.package in PRODUCT and module.path.name != "ending.py" else ():
        if name == "os._exit":
            yield f"line {line} uses {name}"


def no_file_is_unpickled(module: Module) -> Iterator[str]:
    """A pickle runs code when it is read: files hold tensors and JSON."""
    if module.package not in PRODUCT | {"lab"}:
        return
    for _, _, origin in module.imports if str(module.path) != UNPICKLING_FILE else ():
        if origin.split(".")[0] in PICKLING_MODULES:
            yield f"imports {origin}"
    for keyword in module.nodes(ast.keyword):
        is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if (keyword.arg == "weights_only" and not is_true) or (keyword.arg == "allow_pickle" and is_true):
            yield f"line {keyword.value.lineno} allows pickles by {keyword.arg}"


def libraries_name_no_option(module: Module) -> Iterator[str]:
    """Users of `zero` and `parallel` alone have no options; gpt/settings/option_names.py puts them into errors.

    In `zero` all strings are checked, because errors and log lines are also put together outside `raise`.
    """
    if module.package not in {"zero", "parallel"}:
        return
    roots = module.nodes(ast.Module if module.package == "zero" else ast.Raise)
    nodes = [node for root in roots for node in ast.walk(root)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    for node in texts:
        named = OPTION.search(node.value)
        if id(node) not in docstrings and named and not _is_module(node.value):
            yield f"line {node.lineno} names the option {named[0]}"


def _is_module(text: str) -> bool:
    return re.fullmatch(r"[\w.]+", text) is not None and Path(ROOT, f"{text.replace('.', '/')}.py").is_file()


def there_is_no_global_statement(module: Module) -> Iterator[str]:
    for node in module.nodes(ast.Global):
        yield f"line {node.lineno} makes {', '.join(node.names)} global"


def every_module_says_what_it_is(module: Module) -> Iterator[str]:
    if module.source.strip() and not ast.get_docstring(module.tree):
        yield "has no docstring"


def docstrings_begin_with_a_verb_or_a_noun(module: Module) -> Iterator[str]:
    """A question word or a preposition begins a fragment whose subject the reader has to guess."""
    for line, docstring in module.docstrings():
        if (first := docstring.split()[0].strip(",:;")) in HEADLESS:
            yield f"line {line} has a docstring that begins with {first}"


def functions_are_short(module: Module) -> Iterator[str]:
    if module.package not in PRODUCT:
        return
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if (num_lines := node.end_lineno - node.lineno + 1) > MOST_LINES:
            yield f"line {node.lineno}: {node.name} has {num_lines} lines, more than {MOST_LINES}"


def no_imports_form_a_circle(modules: list[Module]) -> Iterator[str]:
    """Imports under TYPE_CHECKING and inside functions count: they hide a circle, they do not open it."""
    try:
        graphlib.TopologicalSorter(imported_files(modules)).prepare()
    except graphlib.CycleError as error:
        yield " <- ".join(error.args[1])


def no_folder_is_a_hallway(modules: list[Module]) -> Iterator[str]:
    folders = Counter(str(module.path.parent) for module in modules if module.path.name != "__init__.py")
    for folder, num_modules in folders.items():
        if num_modules > MOST_MODULES and folder not in ONE_FILE_EACH:
            yield f"{folder} has {num_modules} modules, more than {MOST_MODULES}"


FUNCTION_OF_51_LINES = "def f():\n" + "    pass\n" * 50
# Sources, and trees of them, that break a rule once.
BREACHES: dict[Rule, list[dict[str, str]]] = {
    imports_follow_the_arrows: [
        {"parallel/mesh.py": "from zero.core.partition.stage import STAGES"},
        {"parallel/world.py": "from parallel.launch.route import route"},
        {"zero/core/engine.py": "def f():\n    from gpt import model"},
        {"zero/formulas/memory.py": "from zero.core.memory.allocators import Placement"},
        {"zero/new_room/file.py": ""},
        {"gpt/model/transformer.py": "from zero import ZeroConfig"},
        {"gpt/model/transformer.py": "from ..trainer import train"},
        {"gpt/trainer.py": "import pretrain_gpt"},
        {"pretrain_gpt.py": "from lab import bench"},
        {"lab/bench/step.py": "from tests import models"},
    ],
    collectives_are_called_in_few_files: [
        {"zero/core/engine.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
        {"gpt/trainer.py": "import torch\ntorch.distributed.barrier()"},
        {"gpt/trainer.py": "from torch import distributed as d\nd.broadcast(x, 0)"},
    ],
    private_parts_of_torch_are_named_in_few_files: [
        {"zero/core/buckets/flat.py": "import torch\ntorch._C._current_graph_task_id()"},
        {"zero/core/optimizer.py": "import torch\ntorch._foreach_norm(x, 2)"},
        {"gpt/builder/train_state.py": "from torch.distributed import fsdp as f\nf._x"},
    ],
    the_environment_is_read_in_one_file: [
        {"parallel/mesh.py": "import os\nos.environ['RANK']"},
        {"gpt/trainer.py": "from os import getenv\ngetenv('RANK')"},
    ],
    no_file_is_unpickled: [
        {"gpt/checkpoint/checkpoint.py": "import pickle"},
        {"gpt/checkpoint/checkpoint.py": "torch.load(path, weights_only=False)"},
        {"data/indexed.py": "np.load(path, allow_pickle=True)"},
    ],
    libraries_name_no_option: [
        {"zero/settings/config.py": "raise ConfigError(f'zero.stage={stage} does not exist')"},
        {"zero/homes/budget/recorder.py": "raise ConfigError('too much; lower ' 'train.steps')"},
        {"zero/extensions/agreement.py": "def f():\n    return Diverged('or a zero.stage below 3')"},
    ],
    there_is_no_global_statement: [{"gpt/trainer.py": "def f():\n    global step\n    step = 1"}],
    every_module_says_what_it_is: [{"gpt/trainer.py": "import torch"}],
    docstrings_begin_with_a_verb_or_a_noun: [
        {"gpt/trainer.py": '"""As many as there are."""'},
        {"scripts/a.py": 'def f():\n    """In short: nothing."""'},
        {"tests/a.py": 'class A:\n    """\n    Where, and when.\n    """'},
    ],
    functions_are_short: [{"gpt/trainer.py": FUNCTION_OF_51_LINES}],
    no_imports_form_a_circle: [
        {"zero/a.py": "from zero.b import x", "zero/b.py": "import zero.a"},
        {"zero/a.py": "from zero import b", "zero/b.py": "def f():\n    from zero.a import x"},
        {
            "zero/a.py": "import zero.b.c",
            "zero/b/c.py": "from zero.d import x",
            "zero/d.py": "if TYPE_CHECKING:\n    from .a import y",
        },
    ],
    processes_are_ended_in_one_file: [{"parallel/world.py": "import os\nos._exit(2)"}],
    no_folder_is_a_hallway: [{f"tests/unit/zero/test_{number}.py": "" for number in range(MOST_MODULES + 1)}],
}
ALLOWED: dict[Rule, list[dict[str, str]]] = {
    imports_follow_the_arrows: [
        {"gpt/trainer.py": "import torch\nfrom zero.core.partition import stage\nfrom .model import GPT"},
        {"zero/formulas/memory.py": "from zero.core.partition.stage import STAGES\nimport zero.formulas.a"},
        {"tests/unit/test_a.py": "from lab import bench\nfrom tests.ranks import run_ranks"},
    ],
    collectives_are_called_in_few_files: [
        {"parallel/mesh.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
        {"zero/core/engine.py": "import torch\naxis.all_reduce(x, out=x)\ntorch.all(x)"},
    ],
    private_parts_of_torch_are_named_in_few_files: [
        {"parallel/torch_internals.py": "from torch._ops import OpOverload"},
        {"zero/core/buckets/flat.py": "import torch\nself._C = torch.__version__"},
    ],
    the_environment_is_read_in_one_file: [{"parallel/world.py": "import os\nos.environ['RANK']"}],
    processes_are_ended_in_one_file: [{"parallel/ending.py": "import os\nos._exit(2)"}],
    no_file_is_unpickled: [{"gpt/checkpoint/checkpoint.py": "torch.load(path, weights_only=True)"}],
    libraries_name_no_option: [
        {"zero/settings/config.py": "raise ConfigError(f'ZeroConfig.stage={stage} does not exist')"},
        {"zero/settings/config.py": '"""The meaning of `zero.stage`."""'},
        {"zero/core/buckets/gradients.py": "raise ValueError('inside `with model.accumulate():`')"},
        {"gpt/builder/train_state.py": "raise ConfigError('parallel.tensor_size=3')"},
        {"zero/__init__.py": "{'zero.activations.stores': 'ActivationStore'}"},
    ],
    every_module_says_what_it_is: [{"zero/__init__.py": ""}],
    docstrings_begin_with_a_verb_or_a_noun: [{"gpt/trainer.py": '"""Assert that it holds. Whatever it is."""'}],
    functions_are_short: [
        {"gpt/trainer.py": FUNCTION_OF_51_LINES.removesuffix("    pass\n")},
        {"lab/faults/runs.py": FUNCTION_OF_51_LINES},
    ],
    no_imports_form_a_circle: [{"zero/a.py": "import zero.b, zero.c", "zero/b.py": "import zero.c", "zero/c.py": ""}],
    no_folder_is_a_hallway: [{f"zero/{name}.py": "" for name in ["__init__", *map(str, range(MOST_MODULES))]}],
}


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    modules = all_modules()
    assert {module.package for module in modules} == {*PACKAGES, "pretrain_gpt"}
    return modules


def test_a_room_imports_only_rooms_below_it():
    rooms = list(FLOORS)
    for number, (room, names) in enumerate(FLOORS.items()):
        below = set(rooms[:number]) | {room}
        assert {one for name in names.split() for one in _expanded(name)} <= below | {"tests"}, room


@pytest.mark.parametrize("rule", BREACHES, ids=lambda rule: rule.__name__)
def test_the_source_obeys(rule: Rule, modules: list[Module]):
    assert breaches(rule, modules) == []


@pytest.mark.parametrize("rule", BREACHES, ids=lambda rule: rule.__name__)
def test_a_rule_notices_a_breach_and_lets_the_rest_pass(rule: Rule):
    found = {str(sources): len(breaches(rule, _tree(sources))) for sources in BREACHES[rule]}
    assert found == dict.fromkeys(found, 1)
    for sources in ALLOWED.get(rule, []):
        assert breaches(rule, _tree(sources)) == []


def breaches(rule: Rule, modules: list[Module]) -> list[str]:
    if rule in (no_imports_form_a_circle, no_folder_is_a_hallway):
        return list(rule(modules))
    return [f"{module.path} {breach}" for module in modules for breach in rule(module)]


def _tree(sources: dict[str, str]) -> list[Module]:
    return [Module(PurePosixPath(path), source) for path, source in sources.items()]


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_the_web_toolkit_named_apex_is_not_required(name: str):
    requirement = re.compile(r'^\s*"?apex\b', re.MULTILINE)
    assert requirement.search('torch\n    "apex>=0.9",')
    assert not requirement.search((ROOT / name).read_text())


def start_and_show_help() -> None:
    with suppress(SystemExit), mock.patch.object(sys, "argv", ["pretrain_gpt.py", "--help"]):
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    sys.stdout.write(f"{gc.isenabled()} {gc.get_freeze_count() > 100_000}")


def test_the_garbage_collector_of_a_run_never_visits_what_was_imported(tmp_path: Path):
    said = tmp_path / "said"
    assert wait_for_end(start_forked(said, start_and_show_help)) == 0
    assert said.read_text().splitlines()[-1] == "True True"


def test_a_rank_starts_without_what_it_may_never_use():
    """A thousand ranks read from one file system what each of them imports."""
    script = "import pretrain_gpt, sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    rarely_used = ["transformers", "matplotlib", "wandb", "datasets", "tensorboard"]
    result = subprocess.run([sys.executable, "-c", script, *rarely_used], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
