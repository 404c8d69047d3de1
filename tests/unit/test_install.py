"""The library as an installed package: its names, its wheel, and files of the user that have the same names."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import zero
from lab.races.mutants.__main__ import copy_tree
from tests.source_files import ROOT
from zero import require_siblings

EXTRAS = ["safetensors", "transformers", "datasets", "tokenizers", "wandb", "rich", "matplotlib", "yaml", "filelock"]
BLOCKED = f"import sys; sys.modules |= dict.fromkeys({EXTRAS!r})\n"
TRAIN = """
import json
import torch
from zero import Mesh, ZeroConfig, ZeroDataParallel, ZeroOptimizer, save, start_world, stop_world

losses = {}
world = start_world()
mesh = Mesh.create(tensor_size=1, device_type=world.device.type)
for stage in range(4):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(world.device)
    model = ZeroDataParallel(module, mesh.data, ZeroConfig(stage=stage))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1)
    rows = torch.arange(32.0).view(4, 8)[mesh.data.rank :: 2]
    for _ in range(3):
        loss = model(rows.to(world.device)).square().mean()
        loss.backward()
        optimizer.step()
    losses[stage] = loss.item()
    save(f"saved-{stage}", model, optimizer)
if world.is_first:
    print(json.dumps(losses))
stop_world()
"""
TYPES = """
from zero import *
import zero
from zero import Axis

reveal_type(zero.ZeroDataParallel)
reveal_type(Axis)
zero.ZeroDateParallel
"""


def output_of(*command: object, **options: object) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, **options).stdout


def test_the_public_names_exist_for_users_and_for_type_checkers():
    blocks = [node for node in ast.parse(Path(zero.__file__).read_text()).body if isinstance(node, ast.If)]
    typed = [(n.module, n.names[0].asname) for node in blocks for n in node.body if isinstance(n, ast.ImportFrom)]
    assert sorted(name for _, name in typed) == zero.__all__
    assert all(getattr(zero, name) is getattr(import_module(module), name) for module, name in typed)
    for name, message in (("ZeroDateParallel", "module 'zero' has no attribute"), ("Dion", "removed; use zero.Muon")):
        with pytest.raises(AttributeError, match=message):
            getattr(zero, name)


def test_zero_loads_a_name_when_it_is_used_and_nothing_that_only_extras_install():
    show = "print([name for name in sys.modules if name.partition('.')[0] in ('zero', 'parallel', 'torch')])"
    walk = "import pkgutil; [__import__(m.name) for m in pkgutil.walk_packages(zero.__path__, 'zero.')]"
    program = f"import zero; {show}; zero.ZeroOptimizer; zero.ZeroDataParallel; {show}; {walk}"
    imported, used = output_of(sys.executable, "-c", BLOCKED + program, cwd=ROOT).splitlines()
    assert imported == "['zero']"
    rare = "zero.updates", "zero.checkpoint", "zero.homes.budget", "zero.fp8.layers", "zero.activations"
    assert [name for name in ast.literal_eval(used) if name.startswith(rare)] == []


@pytest.mark.parametrize("name", ["data.py", "data/__init__.py"])
def test_a_file_of_the_user_with_the_name_of_a_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    require_siblings("gpt", "data", "parallel")
    in_the_way = tmp_path / name
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.touch()
    monkeypatch.delitem(sys.modules, "data", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"gpt needs .*/data, but Python imports {in_the_way} by the name data"):
        require_siblings("gpt", "data", "parallel")


def test_a_name_of_which_python_finds_no_file_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder_without_code").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    require_siblings("gpt", "nothing_of_this_name", "folder_without_code")


@pytest.mark.parametrize("name", ["parallel.py", "zero.py"])
def test_a_file_of_the_user_beside_the_script_is_named_in_the_last_line(name: str, tmp_path: Path):
    (tmp_path / name).touch()
    (tmp_path / "train.py").write_text("from zero import ZeroDataParallel\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "train.py"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert str(tmp_path / name) in ended.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def python_with_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the wheel, and with the packages of this one but the project."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_tree(folder / "source")  # a build leaves files in the folder of the source
    pip = sys.executable, "-m", "pip", "--quiet"
    output_of(*pip, "wheel", folder / "source", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels")
    (wheel,) = (folder / "wheels").iterdir()
    assert zero.__version__ in wheel.name
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"zero", "parallel", f"zero_gpt-{zero.__version__}.dist-info"}
    output_of(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
    (site,) = folder.glob("environment/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    output_of(*pip, "install", "--no-deps", "--target", site, wheel)
    return folder / "environment/bin/python"


@pytest.mark.full
def test_the_wheel_alone_trains_in_all_stages(python_with_wheel: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text(BLOCKED + TRAIN)
    launch = python_with_wheel, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"
    losses = json.loads(output_of(*launch, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    assert len(losses) == 4
    assert list(losses.values()) == pytest.approx([losses["0"]] * 4, rel=1e-5)  # fp32, three steps


@pytest.mark.full
def test_mypy_knows_the_names_of_the_wheel(python_with_wheel: Path, tmp_path: Path):
    (tmp_path / "names.py").write_text(TYPES)
    mypy = sys.executable, "-m", "mypy", "--python-executable", python_with_wheel, "names.py"
    ended = subprocess.run([*map(str, mypy)], cwd=tmp_path, capture_output=True, text=True, check=False)
    known, axis, error, _ = ended.stdout.splitlines()
    assert "zero.data_parallel.ZeroDataParallel" in known
    assert "parallel.mesh.Axis" in axis
    assert error.endswith('error: Module has no attribute "ZeroDateParallel"  [attr-defined]')
