#!/usr/bin/env bash
# What the launchers set before they start ranks, each with its reason; what is set already stays. To be sourced, with
# python (the interpreter), nnodes (nodes of the job), ranks (of this node) and rdzv (HOST:PORT of the first node) set.
# It leaves is_host (1: this node is the first), local_address and interface: how this node reaches the first one.
# shellcheck disable=SC2034,SC2154  # variables of the script that sources this one

is_host='' local_address='' interface=''
route=$("$python" -m parallel.launch.route "$rdzv")
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
# One queue from the host to the device keeps collectives and kernels in the order that overlap is planned for.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Segments of memory that grow: fewer gaps between tensors of many sizes. Two names: before and since torch 2.9.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-$PYTORCH_ALLOC_CONF}
