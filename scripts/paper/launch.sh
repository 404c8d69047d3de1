#!/usr/bin/env bash
# One experiment of the paper on a real cluster; run it on every node. Its metrics.jsonl then appears in docs/paper.
#
#   NNODES=25 RDZV=node0:29500 scripts/paper/launch.sh configs/paper/figure2/100b-zero-400.yaml [--train.steps 50]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config=$1
shift
RANKS_PER_NODE=${GPUS_PER_NODE:-16} scripts/launch/torchrun.sh --config "$config" --train.steps 20 --train.log_every 5 "$@"
