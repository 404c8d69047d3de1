#!/usr/bin/env bash
# Installs the packages that pyproject.toml names beside a torch that is already there, such as that of NVIDIA's PyTorch
# image, and never changes that torch. Such a build is called 2.12.0a0+...: pip may take it for older than the release
# that is required, and replace it. The versions of requirements.txt are for scripts/setup.sh and not used here.
#
#   scripts/container/install.sh
#
# PYTHON names the interpreter (python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python}

# Print NAME==VERSION of torch and of what came with it. End with an error if there is no torch, or an old one.
installed() {
    "$python" - <<'PYTHON'
import re, sys
from importlib.metadata import distributions
found = {}
for distribution in distributions():  # the first of two with one name is the one that is imported
    found.setdefault(re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower(), distribution.version)
if "torch" not in found:
    sys.exit("error: there is no torch in this environment; use an image with torch, or scripts/setup.sh")
if tuple(map(int, re.findall(r"\d+", found["torch"])[:2])) < (2, 11):
    sys.exit(f"error: torch is {found['torch']}, and 2.11 or newer is needed; choose a newer image")
came_with = re.compile(r"(torch(vision|audio|ao)?|(pytorch-)?triton|numpy|nvidia-.*)")
print("\n".join(f"{name}=={version}" for name, version in sorted(found.items()) if came_with.fullmatch(name)))
PYTHON
}

before=$(installed)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "$before" >"$constraints"
packages=$("$python" -c '
import tomllib
file = tomllib.load(open("pyproject.toml", "rb"))
named = file["project"]["dependencies"] + file["dependency-groups"]["gpt"]
print("\n".join(each for each in named if not each.startswith("torch")))')
mapfile -t packages <<<"$packages"
"$python" -m pip --no-input --disable-pip-version-check install --no-cache-dir --constraint "$constraints" "${packages[@]}"

changed=$(comm -23 <(echo "$before") <(installed))
if [[ -n $changed ]]; then
    echo "error: the installation has replaced ${changed//$'\n'/, }" >&2
    exit 1
fi
echo "installed beside $(grep '^torch==' <<<"$before")"
