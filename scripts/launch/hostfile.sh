#!/usr/bin/env bash
# Trains on the nodes of a list, through ssh, on clusters without a scheduler. Arguments are those of pretrain_gpt.py.
#
#   HOSTS=hosts.txt scripts/launch/hostfile.sh --config configs/quickstart.yaml --run.dir /shared/runs/first
#
# Variables of the environment whose names begin with NCCL_, HF_ or WANDB_ are passed to the nodes, and those that
# PASS="NAME NAME" names, but no key, token, secret or password.
#
# hosts.txt has one host a line, or USER@HOST. All nodes connect to the first one, where RDZV_PORT (29500) and the port
# after it must be free. Every node must have this folder at the same path. The exit code is that of the first node that
# failed. With MIN_NODES=1 the run goes on without nodes that are lost; the exit code is that of the last node, and the
# two ports must be free on every node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[[ -r ${HOSTS:?HOSTS names a file with one host a line} ]] || {
    echo "error: HOSTS=$HOSTS cannot be read; give a file with one host a line" >&2
    exit 2
}
mapfile -t hosts < <(sed 's/#.*//' "$HOSTS" | awk 'NF {print $1}')
[[ ${#hosts[@]} -gt 0 ]] || {
    echo "error: HOSTS=$HOSTS names no host" >&2
    exit 2
}

# ssh does not pass on the environment of this shell, so the variables that torchrun.sh reads are part of the command.
settings="NNODES=${#hosts[@]} RDZV=${hosts[0]#*@}:${RDZV_PORT:-29500} NODE_NAMES=$(
    IFS=,
    echo "${hosts[*]#*@}"
)"
names=(RANKS_PER_NODE MIN_NODES MAX_RESTARTS CHECK PREFLIGHT_SECONDS LOGS HEALTH PYTHON OMP_NUM_THREADS RDZV_ID)
read -ra more <<<"${PASS:-}"
for name in "${names[@]}" "${!NCCL_@}" "${!HF_@}" "${!WANDB_@}" "${more[@]}"; do
    # Keys would be visible among the processes and in the output of every node.
    [[ -z ${!name:-} || ${name^^} =~ KEY|TOKEN|SECRET|PASSW|CRED|AUTH || ${!name} =~ ://[^/]*@ ]] || settings+=" $name=$(printf %q "${!name}")"
done
command="cd $(printf %q "$PWD") && exec env $settings scripts/launch/torchrun.sh"
[[ $# -eq 0 ]] || command+=$(printf ' %q' "$@")

# -tt gives every ssh a terminal. When this script ends or is interrupted, the terminals close and end what runs there.
children=()
for host in "${hosts[@]}"; do
    echo "+ ssh $host $command" >&2
    ssh -tt -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$host" "$command" </dev/null > >(sed -u "s/^/$host: /") 2>&1 &
    children+=($!)
done
trap 'kill "${children[@]}" 2>/dev/null || true' EXIT

# After one node has failed, the others end by themselves or wait for it forever. They get GRACE_SECONDS (30) to end,
# then this script exits and the trap above stops them.
code=0
for _ in "${hosts[@]}"; do
    code=0
    wait -n "${children[@]}" || code=$?
    [[ $code == 0 || -n ${MIN_NODES:-} ]] || break
done
deadline=$((SECONDS + ${GRACE_SECONDS:-30}))
while [[ $code -ne 0 && $SECONDS -lt $deadline ]] && kill -0 "${children[@]}" 2>/dev/null; do
    sleep 0.2
done
exit "$code"
