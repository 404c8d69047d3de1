#!/usr/bin/env bash
# Runs one experiment of the paper on a real cluster. Run it on every node, with the environment variables of
# scripts/launch/torchrun.sh, such as RANKS_PER_NODE. scripts/paper/reproduce.sh then shows the result in docs/paper.
#
#   NNODES=25 RDZV=node0:29500 scripts/paper/launch.sh configs/paper/figure2/100b-zero-400.yaml [--train.steps 50]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config=$1
shift
exec scripts/launch/torchrun.sh --config "$config" --train.steps 20 --train.log_every 5 --train.eval_samples 0 \
    --train.sample_tokens 0 --schedule.warmup_steps 0 --checkpoint.last false "$@"
