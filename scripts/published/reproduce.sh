#!/usr/bin/env bash
# Predicts the published throughputs in configs/published by dry runs and writes docs/published, on any machine, in
# minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

python -m lab.published.row_settings
python -m lab.published.reproduce
python -m lab.published.fp8
python -m lab.published.planner
