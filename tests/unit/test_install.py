"""The project as an installed package: its commands, its wheel, and files of the user that have the same names."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zero
from lab.faults.runs import prepare_corpus
from lab.races.mutants.__main__ import copy_tree
from tests.end_to_end.runs import options
from tests.source_files import ROOT
from zero import require_siblings

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_each_command_runs_a_module_that_exists():
    commands = (ROOT / "gpt/commands.py").read_text()
    modules = dict(re.findall(r'^(\w+) = _command\("([\w.]+)"\)', commands, flags=re.MULTILINE))
    assert PROJECT["scripts"] == {f"zero-gpt-{name}": f"gpt.commands:{name}" for name in modules}
    for module in modules.values():
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_public_names_exist():
    assert all(hasattr(zero, name) for name in zero.__all__)


def test_zero_imports_what_is_installed_without_extras():
    extras = ["safetensors", "transformers", "datasets", "tokenizers", "rich", "matplotlib", "yaml"]
    blocked = f"import sys; sys.modules |= dict.fromkeys({extras!r})"
    walk = "import pkgutil, zero; [__import__(m.name) for m in pkgutil.walk_packages(zero.__path__, 'zero.')]"
    subprocess.run([sys.executable, "-c", f"{blocked}; {walk}"], cwd=ROOT, check=True)


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


@pytest.mark.full
def test_a_wheel_is_built_installed_elsewhere_and_trains(tmp_path: Path):
    source, wheels, site, work = (tmp_path / name for name in ("source", "wheels", "site", "work"))
    work.mkdir()
    copy_tree(source)  # a build leaves files in the folder of the source
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", wheels], check=True)
    (wheel,) = wheels.iterdir()
    assert PROJECT["version"] in wheel.name
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    arguments = options(prepare_corpus(work), work / "run", train__steps=2)
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [site / "bin/zero-gpt-pretrain", *arguments]
    subprocess.run(command, cwd=work, env=environment, check=True, capture_output=True)
    assert len((work / "run/metrics.jsonl").read_text().splitlines()) == 2
