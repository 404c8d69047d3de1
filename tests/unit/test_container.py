"""The container: its Containerfile, the job for Kubernetes, and the installation beside a torch that is kept."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.source_files import ROOT

JOB = ROOT / "scripts/container/pytorchjob.yaml"
# A build of NVIDIA's image: a pre-release of 2.11, which `torch>=2.11` does not accept.
IMAGES_TORCH = "2.11.0a0+eb65b36914.nv26.02"


def test_the_containerfile_uses_files_that_exist_and_no_pinned_torch():
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    programs = [line.split()[1] for line in lines if line.startswith("RUN scripts/")]
    assert all((ROOT / path).exists() for path in [*sources, *programs])
    assert "ENV PYTHON=python" in lines, "else the launchers would make .venv"
    assert "requirements.txt" not in "\n".join(lines)


def test_ranks_in_a_container_are_not_root_and_secrets_stay_outside_of_images_and_commits():
    users = [line.split()[1] for line in (ROOT / "Containerfile").read_text().splitlines() if line.startswith("USER ")]
    (pod, other) = (
        role["template"]["spec"] for role in yaml.safe_load(JOB.read_text())["spec"]["pytorchReplicaSpecs"].values()
    )
    assert users[-1:] == [str(pod["securityContext"]["runAsUser"])] != ["0"]
    assert pod == other
    assert all(".env" in (ROOT / name).read_text().splitlines() for name in (".gitignore", ".dockerignore"))


def test_the_job_for_kubernetes_starts_the_launcher_on_all_nodes():
    job = yaml.safe_load(JOB.read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    for role in replicas.values():
        spec = role["template"]["spec"]
        (container,) = spec["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert container["name"] == "pytorch"
        assert int(variables["NNODES"]) == sum(role["replicas"] for role in replicas.values())
        assert int(variables["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert variables["RDZV"].partition(":")[0] == f"{job['metadata']['name']}-master-0"
        assert (ROOT / container["command"][-1]).is_file()
        read = re.findall(r"^#   (\w+)  ", (ROOT / container["command"][-1]).read_text(), flags=re.MULTILINE)
        assert set(variables) <= set(read), "the launcher reads all of them"
        assert (ROOT / container["args"][1]).is_file()
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def plain_environment(folder: Path) -> Path:
    """Return the interpreter of a new environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


def add_torch(python: Path, version: str) -> None:
    """Add a torch to an environment, a stub, and the packages of this environment but its torch."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").touch()
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")


def install(python: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python)}
    command = [ROOT / "scripts/container/install.sh"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_image_without_a_torch_that_is_new_enough_is_refused(tmp_path: Path):
    python = plain_environment(tmp_path / "image")
    without = install(python)
    add_torch(python, "2.10.0a0+b558c986e8.nv25.11")
    with_old = install(python)
    assert without.stderr.startswith("error: there is no torch in this environment")
    assert with_old.stderr.startswith("error: torch is 2.10.0a0+b558c986e8.nv25.11, and 2.11 or newer is needed")
    assert without.returncode == with_old.returncode == 1


@pytest.mark.full
def test_the_packages_are_installed_beside_the_torch_of_an_image(tmp_path: Path):
    python = plain_environment(tmp_path / "image")
    add_torch(python, IMAGES_TORCH)
    ended = install(python)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"installed beside torch=={IMAGES_TORCH}"
    show = "import torch, transformers, yaml; print(torch.__version__)"
    found = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.split() == [IMAGES_TORCH]
