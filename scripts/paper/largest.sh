#!/usr/bin/env bash
# The largest model on a real cluster, by trying: layers grow from the second argument until a run is out of memory,
# which its metrics.jsonl records, and then as close as STEP layers. Run it on every node; they must share this folder.
#
#   NNODES=25 RDZV=node0:29500 STEP=5 scripts/paper/largest.sh configs/paper/figure6/140b-c4-400.yaml 150
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -n ${PYTHON:-} ]] || source scripts/setup.sh

exec "${PYTHON:-python}" -m scripts.paper.largest "$1" "$2" --step "${STEP:-1}" "${@:3}"
