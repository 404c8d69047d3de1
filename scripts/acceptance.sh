#!/usr/bin/env bash
# Checks and measures a machine in under 15 minutes, and writes docs/results/<gpu>.md; docs/acceptance.md says what it
# does and how to read it. Without GPUs it runs the same on CPUs at tiny sizes. --help lists the arguments.
#
#   scripts/acceptance.sh                                             # all GPUs
#   scripts/acceptance.sh --gpus 4 --output runs/first-day            # four of them; the results go elsewhere
#   scripts/acceptance.sh --long --data runs/data/openwebtext         # also hours of training, beside a published curve
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
exec python -m lab.acceptance "$@"
