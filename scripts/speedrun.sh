#!/usr/bin/env bash
# From text to the score of a public record, on the GPUs of this node. RECIPE is a file of configs/speedrun; other arguments
# are those of pretrain_gpt.py. REHEARSAL=1 does the same in a minute on two cores: a small model, and the sources of
# Python's standard library for a text. docs/speedrun.md has times, and what differs from the records.
#
#   scripts/speedrun.sh nanogpt-124m
#   REHEARSAL=1 scripts/speedrun.sh nanochat-d20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
recipe=${1:-}
configs=(--config "configs/speedrun/$recipe.yaml")
# The text of the record, a little more than the run reads, and its tokenizer.
case $recipe in
nanogpt-124m) text=(HuggingFaceFW/fineweb --config sample-10BT --max_documents 4400000 --tokenizer gpt2) ;;
nanochat-d20) text=(HuggingFaceFW/fineweb-edu --config sample-100BT --max_documents 12500000 --train_vocab_size 65536
    --train_bytes 2000000000) ;;
*) echo "speedrun.sh: RECIPE=$recipe is not nanogpt-124m or nanochat-d20; choose one of them" >&2 && exit 2 ;;
esac
shift
source scripts/setup.sh

data=runs/speedrun/data/$recipe
if ((${REHEARSAL:-0})); then
    text=(stdlib --train_vocab_size 8192)
    data=runs/speedrun/data/rehearsal
    configs+=(--config configs/speedrun/rehearsal.yaml --data.path "$data" --run.dir "runs/speedrun/rehearsal/$recipe")
fi
if [[ ! -f $data.idx ]]; then # written last: if it exists, the data is complete
    python -m data.prepare --source "${text[@]}" --workers "$(getconf _NPROCESSORS_ONLN)" --output "$data"
fi

num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU ' || true)
torchrun --standalone --nproc_per_node="$((num_gpus ? num_gpus : 2))" pretrain_gpt.py "${configs[@]}" "$@"
