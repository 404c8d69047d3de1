#!/usr/bin/env bash
# Measures a training step of every ZeRO stage beside torch's DDP, ZeroRedundancyOptimizer and FSDP2, on the same model
# and data. Arguments are those of lab/bench/step_time.py; --help lists them. NUM_RANKS is one rank a GPU by
# default, or two on CPUs. CUDA_VISIBLE_DEVICES= NUM_RANKS=2 measures on CPUs if there are GPUs.
#
#   scripts/bench/step_time.sh
#   scripts/bench/step_time.sh --precision bf16 --rounds 80 --json step_time.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
num_ranks=${NUM_RANKS:-$((num_gpus > 0 ? num_gpus : 2))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun --standalone --nproc_per_node="$num_ranks" -m lab.bench.step_time "$@"
