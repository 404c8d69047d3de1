#!/usr/bin/env bash
# Makes .venv with the pinned packages, or does nothing if it is complete. The other scripts source this file, which
# activates the environment and changes to the repository root. Run on its own, it only installs.
#
#   scripts/setup.sh
#   TORCH_INDEX_URL=<url> scripts/setup.sh     # take torch from this index, such as PyTorch's index of CPU builds
#   scripts/setup.sh --hashes                  # install nothing but files with the hashes of requirements.hashes.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

require_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
    echo "setup: $1 is $("$1" -V 2>&1), Python 3.11 or newer is needed: put one first on PATH${2:-}" >&2
    exit 1
}

# The file of packages, if this script is run and not sourced: the arguments of others are not for it.
requirements=requirements.txt
[[ ${BASH_SOURCE[0]} != "$0" || ${1:-} != --hashes ]] || requirements=requirements.hashes.txt

# Print what the environment is made from. The last complete installation wrote the same line to .venv/complete.
fingerprint() {
    .venv/bin/python -c '
import hashlib, pathlib, sys
print(sys.version.split()[0], hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest())' "$1"
}

# Install all packages anew, each of which must have one of its hashes: those of PyPI's files.
install_by_hashes() {
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        echo "setup: --hashes knows the files of PyPI, and TORCH_INDEX_URL names another index: unset it" >&2
        exit 2
    fi
    .venv/bin/python scripts/install.py --require-hashes --force-reinstall --requirement "$requirements"
}

install_packages() {
    # Removed before anything is installed: after an interruption the next run must not find the file and skip the rest.
    rm -f .venv/complete
    [[ -x .venv/bin/python ]] || require_python python3
    echo "setup: making .venv; the first time may take minutes"
    [[ -x .venv/bin/pip ]] || python3 -m venv .venv
    require_python .venv/bin/python ", and remove .venv"

    if [[ $requirements == requirements.hashes.txt ]]; then
        install_by_hashes
        fingerprint "$requirements" >.venv/complete
        return
    fi

    # uv installs the packages, by scripts/install.py.
    local why pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
    why=$("${pip[@]}" install -qq uv==0.13.9 2>&1) || echo "setup: pip installs, as it cannot get uv: ${why##*$'\n'}" >&2

    # Torch is installed first and alone, because no other package may come from its index. On a machine without a GPU
    # set TORCH_INDEX_URL to an index of CPU builds; the default one sends gigabytes of CUDA libraries.
    echo "setup: 1 of 2, torch"
    env ${TORCH_INDEX_URL:+"PIP_INDEX_URL=$TORCH_INDEX_URL"} \
        .venv/bin/python scripts/install.py "$(grep '^torch==' requirements.txt)"
    echo "setup: 2 of 2, everything else"
    .venv/bin/python scripts/install.py --requirement requirements.txt
    fingerprint "$requirements" >.venv/complete
    echo "setup: done"
}

# An environment that was made with hashes is complete for all who ask for none.
is_complete() {
    [[ -f .venv/complete ]] || return 1
    local made
    made=$(<.venv/complete)
    [[ $made == "$(fingerprint "$requirements")" || $made == "$(fingerprint requirements.hashes.txt)" ]]
}

# Nodes that start together may share this folder: one of them installs, the others wait for it.
if ! is_complete; then
    mkdir -p .venv
    exec {setup_lock}>.venv/lock
    flock "$setup_lock" || echo "setup: no lock on this disk; run scripts/setup.sh once before many nodes need it" >&2
    is_complete || install_packages
    exec {setup_lock}>&-
fi
source .venv/bin/activate
