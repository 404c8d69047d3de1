#!/usr/bin/env bash
# Makes .venv with the pinned packages; when that is done already, does nothing. The other scripts source this file and
# find the environment active and themselves in the repository root; run alone, it only installs.
#
#   scripts/setup.sh
#   TORCH_INDEX_URL=<url> scripts/setup.sh     # take torch from this index, such as PyTorch's own of CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

require_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
    echo "setup: $1 is $("$1" -V 2>&1), Python 3.11 or newer is needed: put one first on PATH${2:-}" >&2
    exit 1
}

# What an environment was made from. It is compared with the stamp that the last complete installation left behind.
fingerprint() {
    .venv/bin/python -c '
import hashlib, pathlib, sys
print(sys.version.split()[0], hashlib.sha256(pathlib.Path("requirements.txt").read_bytes()).hexdigest())'
}

install_packages() {
    # An interrupted installation has neither the old stamp nor a new one, so that the next run takes it up again.
    rm -f .venv/complete
    [[ -x .venv/bin/python ]] || require_python python3
    echo "setup: making .venv; the first time takes a few minutes"
    [[ -x .venv/bin/pip ]] || python3 -m venv .venv
    require_python .venv/bin/python ", and remove .venv"

    # Torch goes first and alone: its index, where one is given, is not to answer for any other package. Without a
    # GPU, name an index of CPU builds, or the default one sends gigabytes of CUDA libraries.
    local pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install)
    echo "setup: 1 of 2, torch"
    "${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' requirements.txt)"
    echo "setup: 2 of 2, everything else"
    "${pip[@]}" --requirement requirements.txt
    fingerprint >.venv/complete
    echo "setup: done"
}

if [[ ! -f .venv/complete || "$(<.venv/complete)" != "$(fingerprint)" ]]; then
    install_packages
fi
source .venv/bin/activate
