#!/usr/bin/env bash
# Reproduces the paper's tables and figures in docs/paper by dry runs, on any machine, in minutes on one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

python -m scripts.paper.experiments
python -m scripts.paper.reproduce
