#!/usr/bin/env bash
# Trains a small language model from a clean checkout. The text is the source of Python's standard library, so only
# packages are downloaded. Arguments are those of pretrain_gpt.py and override configs/quickstart.yaml
# and configs/quickstart_muon.yaml.
#
#   scripts/quickstart.sh
#   scripts/quickstart.sh --zero.stage 3 --run.dir runs/quickstart-stage-3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

# Train a tokenizer on the text and encode the text with it, once.
data=runs/quickstart/data/stdlib
if [[ ! -f $data.idx ]]; then # written last: if it exists, the data is complete
    echo "== data: learning a vocabulary of 8192 and encoding the standard library"
    python -m data.prepare --source stdlib --output "$data" --train_vocab_size 8192
fi

# Use two ranks, so that ZeRO has ranks to partition over, but only one on a machine with a single GPU.
num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
num_ranks=$((num_gpus == 1 ? 1 : 2))

# The ranks share the cores of this machine. By default torchrun gives each of them one thread.
num_cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((num_cores + num_ranks - 1) / num_ranks))}

echo "== training: $num_ranks ranks"
torchrun --standalone --nproc_per_node="$num_ranks" pretrain_gpt.py \
    --config configs/quickstart.yaml --config configs/quickstart_muon.yaml "$@"

echo "== done: the text that the model wrote is above; the folder of the run has"
echo "   loss.png        the loss over the steps"
echo "   metrics.jsonl   for each logged step: loss, throughput, memory, traffic"
echo "   config.yaml     every setting, to run it again"
