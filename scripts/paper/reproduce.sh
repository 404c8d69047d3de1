#!/usr/bin/env bash
# The paper's tables and figures by dry runs, on any machine: docs/paper/README.md. Minutes, on one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

python -m scripts.paper.experiments
python -m scripts.paper.reproduce
