#!/usr/bin/env bash
# Finds the largest model on a real cluster: the number of layers grows from the second argument until a run is out of
# memory, which its metrics.jsonl records; then the search narrows to STEP layers. Run it on every node. All nodes must
# share this folder. Runs are in runs/paper/largest; those of other settings or nodes are in other folders there.
#
#   NNODES=25 RDZV=node0:29500 STEP=5 scripts/paper/largest.sh configs/paper/figure6/140b-c4-400.yaml 150
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -n ${PYTHON:-} ]] || source scripts/setup.sh

exec "${PYTHON:-python}" -m lab.paper.largest "$1" "$2" --step "${STEP:-1}" \
    --nodes "${NNODES:-1} of ${RANKS_PER_NODE:-all}" "${@:3}"
