#!/usr/bin/env bash
# Checks the numbers of the environment, finds this node's way to the first one, and tells NCCL and gloo, unless they
# have been told. A launcher sources this file. All that does not need the network, the ranks set themselves
# (parallel/process_defaults.py).
#   It reads:  python (the interpreter), nnodes (nodes of the job), rdzv (HOST:PORT of the first node)
#   It sets:   is_host (1 if this node is the first), local_address and interface (by which this node reaches the first)
# shellcheck disable=SC2034,SC2154  # variables of the script that sources this one

# Arithmetic of bash executes what is in a variable.
for name in NNODES NODE_RANK RANKS_PER_NODE MAX_RESTARTS MIN_NODES PREFLIGHT_SECONDS RDZV_PORT GRACE_SECONDS num_gpus; do
    [[ ${!name:-0} =~ ^[0-9]{1,7}$ ]] || {
        echo "error: $name=${!name} is not a whole number; change it" >&2
        exit 2
    }
done

is_host='' local_address='' interface=''
route=$("$python" -m parallel.launch.route "$rdzv")
read -r is_host local_address interface <<<"$route"

# NCCL and gloo first connect over TCP. Unless an interface is named, they use the first one that they find, such as
# docker0, or that of the host's own name, which is often 127.0.1.1. NCCL still sends its data over InfiniBand.
if [[ $nnodes -gt 1 && -n $interface ]]; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface} # =: no other interface that begins like it
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi

# What ranks print is in the log at once, and not a block later.
export PYTHONUNBUFFERED=1
# Torch's warnings of sockets, with a trace of C++ each, are about names that no server knows and ranks that have ended.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
