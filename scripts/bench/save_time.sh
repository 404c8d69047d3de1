#!/usr/bin/env bash
# Measures saving and loading a checkpoint, beside plain copies of the same bytes to memory and to disk.
# Arguments are those of lab/bench/save_time.py. NUM_RANKS (2) is the number of ranks.
#
#   scripts/bench/save_time.sh
#   scripts/bench/save_time.sh --folder /mnt/scratch --rounds 15
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
torchrun --standalone --nproc_per_node="${NUM_RANKS:-2}" -m lab.bench.save_time "$@"
