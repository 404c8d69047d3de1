#!/usr/bin/env bash
# Reproduces the paper's tables and figures in docs/paper by dry runs, on any machine, in 8 minutes of one core. With
# names of parts, such as `figure2 table1`, it prints these and leaves the pages as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

python -m lab.paper.reproduce "$@"
[[ $# -gt 0 ]] || python -m lab.paper.today
