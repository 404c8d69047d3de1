#!/usr/bin/env bash
# One experiment of the paper on a real cluster; run it on every node, or under scripts/launch/hostfile.sh's settings.
# Its metrics.jsonl then appears in docs/paper. What scripts/launch/torchrun.sh reads, such as RANKS_PER_NODE, holds.
#
#   NNODES=25 RDZV=node0:29500 scripts/paper/launch.sh configs/paper/figure2/100b-zero-400.yaml [--train.steps 50]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config=$1
shift
exec scripts/launch/torchrun.sh --config "$config" --train.steps 20 --train.log_every 5 --train.eval_samples 0 \
    --train.sample_tokens 0 --schedule.warmup_steps 0 "$@"
