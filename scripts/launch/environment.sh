#!/usr/bin/env bash
# Sets the environment variables of the ranks, except those that are set already. A launcher sources this file.
#   It reads:  python (the interpreter), nnodes (nodes of the job), ranks (per node), rdzv (HOST:PORT of the first node)
#   It sets:   is_host (1 if this node is the first), local_address and interface (by which this node reaches the first)
# shellcheck disable=SC2034,SC2154  # variables of the script that sources this one

is_host='' local_address='' interface=''
route=$("$python" -m parallel.launch.route "$rdzv")
eval "$route"

# The ranks of a node share its cores. By default torchrun gives each of them one thread.
num_cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((num_cores + ranks - 1) / ranks))}

# NCCL and gloo first connect over TCP. Unless an interface is named, they use the first one that they find, such as
# docker0, or that of the host's own name, which is often 127.0.1.1. NCCL still sends its data over InfiniBand.
if [[ $nnodes -gt 1 && -n $interface ]]; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi

# A collective that fails ends its process with an error; otherwise the other ranks would wait forever.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# With one queue from the host to the device, kernels and collectives start in the order in which they are launched. The
# overlap of communication with computation relies on this order.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Memory segments that can grow leave fewer gaps between tensors of different sizes. The second variable is the name of
# the first before torch 2.9.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-$PYTORCH_ALLOC_CONF}
