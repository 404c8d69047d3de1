#!/usr/bin/env bash
# The largest model on a real cluster, by trying: layers grow by STEP until one run is out of memory, which its
# metrics.jsonl records. Run it on every node.
#
#   NNODES=25 RDZV=node0:29500 STEP=5 scripts/paper/largest.sh configs/paper/figure6/140b-c4-400.yaml 150
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

config=$1
layers=$2
name=$(basename "$config" .yaml)
while scripts/paper/launch.sh "$config" --model.num_layers "$layers" --train.steps 3 --run.dir "runs/paper/largest/$name-$layers"; do
    echo "$layers layers fit"
    layers=$((layers + ${STEP:-1}))
done
echo "$layers layers do not; see runs/paper/largest/$name-$layers/metrics.jsonl"
