#!/usr/bin/env bash
# Trains on one node, or on several when it is started on each of them. Arguments go to pretrain_gpt.py.
#
#   scripts/launch/torchrun.sh --config configs/quickstart.yaml                                  # this node, all GPUs
#   NNODES=2 RDZV=node0:29500 scripts/launch/torchrun.sh --config configs/quickstart.yaml        # the same on both
#
# RDZV names the node where all meet, and two free ports there: this one and the next. RANKS_PER_NODE: ranks of a node
# (its GPUs; 2 without). MAX_RESTARTS: starts after a failure (0). CHECK=0 leaves the checks out, PREFLIGHT_SECONDS says
# how long they wait for the other nodes (120). Exit code: that of the rank that failed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -n ${PYTHON:-} ]] || source scripts/setup.sh
python=${PYTHON:-python}

nnodes=${NNODES:-1}
rdzv=${RDZV:-localhost:29500}
num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
ranks=${RANKS_PER_NODE:-$((num_gpus > 0 ? num_gpus : 2))}

# How this node reaches the meeting point.
is_host='' local_address='' interface=''
route=$("$python" -m parallel.route "$rdzv")
eval "$route"

# The ranks of a node share its cores. Left to itself, torchrun would give each of them one thread.
num_cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((num_cores + ranks - 1) / ranks))}
# NCCL and gloo first meet over TCP. Without a name they take the first interface that they find, such as docker0, or
# the address that the host's own name stands for, which is often 127.0.1.1. NCCL's data still goes over InfiniBand.
if [[ $nnodes -gt 1 && -n $interface ]]; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi
# A collective that fails ends the process with an error, instead of leaving the others to wait for ever.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# One queue from the host keeps collectives and kernels in the order that overlap is planned for.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Segments that grow: fewer gaps between tensors of many sizes.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-$PYTORCH_ALLOC_CONF} # its name before torch 2.9

# All nodes are there, with the same code, data and settings, clocks that agree, and disks that work.
if [[ ${CHECK:-1} == 1 ]]; then
    "$python" -m parallel.preflight --nodes "$nnodes" --meet "${rdzv%:*}:$((${rdzv##*:} + 1))" \
        --names "${NODE_NAMES:-}" --wait "${PREFLIGHT_SECONDS:-120}" -- "$@"
fi

# A scheduler sends its warnings (USR1, TERM) to every process of the job: the ranks save and leave; their launcher
# must not die of the first, nor pass on the second, which a rank that gets it twice takes as "at once".
signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    trap '' USR1 TERM
    signals=SIGINT
fi

command=("$python" -m parallel.launch --nnodes="$nnodes" --nproc-per-node="$ranks" --max-restarts="${MAX_RESTARTS:-0}"
    --rdzv-backend=c10d --rdzv-endpoint="$rdzv" --rdzv-id="${RDZV_ID:-train}" --rdzv-conf="is_host=$is_host"
    --local-addr="$local_address" --signals-to-handle="$signals" pretrain_gpt.py "$@")
echo "+ ${command[*]}" >&2
exec "${command[@]}"
