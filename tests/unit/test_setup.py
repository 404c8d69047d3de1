"""`scripts/install.py` gives uv the settings of pip, and installs by pip if uv cannot."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_files import ROOT

# Records its arguments and some variables, and exits as it is told.
UV = """
import json, os, sys
if sys.argv[1:] == ["cache", "dir"]:
    print(os.environ["CALLS"])
else:
    seen = {name: value for name, value in os.environ.items() if name.startswith(("SSL_", "UV_", "HTTPS_"))}
    open(os.environ["CALLS"], "w").write(json.dumps([sys.argv[1:], seen]))
    sys.exit(int(os.environ.get("ENDS", 0)))
"""


def install(folder: Path, configuration: str = "", **variables: str) -> tuple[list[str], dict[str, str], str]:
    """Return (uv's arguments, the variables that it had, the output) of installing pytest, which is installed."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    (folder / "uv.py").write_text(UV)
    (folder / "pip.conf").write_text(configuration)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    own = {"PYTHONPATH": str(folder), "PIP_CONFIG_FILE": str(folder / "pip.conf"), "CALLS": str(calls)}
    command = [sys.executable, ROOT / "scripts" / "install.py", "pytest"]
    ended = subprocess.run(command, env=kept | own | variables, capture_output=True, text=True, check=False)
    arguments, seen = json.loads(calls.read_text()) if calls.exists() else ([], {})
    return arguments, seen, ended.stdout + ended.stderr


def test_the_hashes_are_of_the_packages_that_are_required():
    required, hashed = (
        {line.split(" ")[0] for line in (ROOT / name).read_text().splitlines() if line and line[0] not in "# "}
        for name in ("requirements.txt", "requirements.hashes.txt")
    )
    assert {name.lower() for name in required} <= hashed


def test_setup_installs_by_hashes_if_it_is_asked_to(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("requirements.txt", "requirements.hashes.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/install.py").write_text("import sys; open('called', 'a').write(f'{sys.argv[1:]}\\n')")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).symlink_to(sys.executable)

    def set_up(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX_URL"} | variables
        command = ["bash", tmp_path / "scripts/setup.sh", *arguments]
        return subprocess.run(command, env=kept, capture_output=True, text=True, check=False)

    refused = set_up("--hashes", TORCH_INDEX_URL="https://a/simple")
    assert (refused.returncode, refused.stderr.count("unset it")) == (2, 1)
    for _ in range(2):
        assert set_up("--hashes").returncode == set_up().returncode == 0
    expected = ["--require-hashes", "--force-reinstall", "--requirement", "requirements.hashes.txt"]
    assert (tmp_path / "called").read_text() == f"{expected}\n"


def test_uv_gets_pips_settings(tmp_path):
    configuration = """
[global]
index-url = https://a/simple
extra-index-url = https://b/simple
    https://c/simple
timeout = 7
pre = false
[install]
find-links = /wheels /more
no-index = true
[download]
only-binary = :all:
"""
    variables = {"PIP_INDEX_URL": "https://d/simple", "PIP_CERT": "/ca.pem", "PIP_PROXY": "p:1", "PIP_QUIET": "1"}
    arguments, seen, said = install(tmp_path, configuration, PIP_TRUSTED_HOST="", **variables)
    assert arguments[:2] == ["pip", "install"]
    assert arguments[-1] == "pytest"
    assert "--no-index" in arguments
    assert not {"--prerelease=allow", "--only-binary", "--allow-insecure-host"} & set(arguments)
    assert seen.pop("UV_LINK_MODE") in ("copy", "hardlink")
    assert seen == {
        "HTTPS_PROXY": "p:1",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_DEFAULT_INDEX": "https://d/simple",
        "UV_EXTRA_INDEX_URL": "https://b/simple https://c/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "7",
    }
    assert "pip goes on" not in said


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"ENDS": "2"}, "setup: uv failed with exit code 2; pip goes on"),
        ({"PIP_REQUIRE_HASHES": "0"}, "setup: uv has nothing for pip's setting require-hashes; pip goes on"),
    ],
)
def test_pip_installs_what_uv_cannot_and_says_why(tmp_path, variables, reason):
    _, _, said = install(tmp_path, **variables)
    assert said.count("setup: ") == 1
    assert reason in said
    assert "Requirement already satisfied: pytest" in said


def test_a_walk_removes_no_folder_that_an_earlier_one_has_not_made(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/jsonl_to_scores.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text("python() { exit 0; }")  # ends the walk when its folder is made
    own = tmp_path / "thesis"
    own.mkdir()
    (own / "chapter.tex").touch()

    def walk() -> tuple[int, str]:
        ended = subprocess.run(["bash", script, own], capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    reason = f"FOLDER={own} holds files that no walk has made; choose a new folder"
    assert walk() == (2, f"jsonl_to_scores.sh: {reason}\n")
    assert (own / "chapter.tex").exists()
    (own / "chapter.tex").unlink()
    for _ in range(2):  # an empty folder, and one of a walk
        assert walk() == (0, "")
        (own / "code.jsonl").touch()
