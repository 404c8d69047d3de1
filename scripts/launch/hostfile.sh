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
# two ports must be free on every node. This host is then the arbiter, which lets half of the nodes go on, if it has an
# environment and the run's folder, and the nodes can reach the port after these two here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[[ -r ${HOSTS:?HOSTS names a file with one host a line} ]] || {
    echo "error: HOSTS=$HOSTS cannot be read; give a file with one host a line" >&2
    exit 2
}
mapfile -t hosts < <(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' "$HOSTS")
[[ ${#hosts[@]} -gt 0 ]] || {
    echo "error: HOSTS=$HOSTS names no host" >&2
    exit 2
}
# Each is a word of commands here and there.
for host in "${hosts[@]}"; do
    [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$ ]] || {
        echo "error: HOSTS=$HOSTS has $(printf %q "$host"), which is no host; give one HOST or USER@HOST a line" >&2
        exit 2
    }
done
twice=$(printf '%s\n' "${hosts[@]#*@}" | sort | uniq -d | head -n 1)
for name in RDZV_PORT GRACE_SECONDS; do
    [[ ${!name:-0} =~ ^[0-9]{1,7}$ ]] || {
        echo "error: $name=${!name} is not a whole number; change it" >&2
        exit 2
    }
done
[[ -z $twice ]] || {
    echo "error: HOSTS=$HOSTS has $twice twice; delete one" >&2
    exit 2
}

# ssh does not pass on the environment of this shell, so the variables that torchrun.sh reads are part of the command.
port=${RDZV_PORT:-29500}
settings="NNODES=${#hosts[@]} RDZV=${hosts[0]#*@}:$port NODE_NAMES=$(
    IFS=,
    echo "${hosts[*]#*@}"
)"
python=${PYTHON:-.venv/bin/python}
if [[ -n ${MIN_NODES:-} && ${NO_ARBITER:-0} != 1 ]] && type "$python" &>/dev/null; then
    if read -r _ ARBITER _ < <("$python" -m parallel.launch.route "${hosts[0]#*@}:$port"); then
        ARBITER+=:$((port + 2))
        "$python" scripts/launch/arbiter.py "$ARBITER" "$@" &
        arbiter=$!
    fi
fi
names=(RANKS_PER_NODE MIN_NODES ARBITER NO_ARBITER MAX_RESTARTS CHECK PREFLIGHT_SECONDS LOGS HEALTH PYTHON OMP_NUM_THREADS RDZV_ID)
read -ra more <<<"${PASS:-}"
secret='KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|BEARER|COOKIE|(^|_)PAT(_|$)'
for name in "${names[@]}" "${!NCCL_@}" "${!HF_@}" "${!WANDB_@}" "${more[@]}"; do
    # Keys would be visible among the processes and in the output of every node.
    [[ -z ${!name:-} || ${name^^} =~ $secret || ${!name} =~ ://[^/]*@ ]] || settings+=" $name=$(printf %q "${!name}")"
done

# -tt gives every ssh a terminal. When this script ends or is interrupted, the terminals close and end what runs there.
children=()
exec {ends}<> <(:) # a pipe: each ssh notes its code there, in the order in which they end
for rank in "${!hosts[@]}"; do
    host=${hosts[rank]}
    command="cd $(printf %q "$PWD") && exec env NODE_RANK=$rank $settings scripts/launch/torchrun.sh"
    [[ $# -eq 0 ]] || command+=$(printf ' %q' "$@")
    echo "+ ssh $host $command" >&2
    {
        trap 'kill "$(jobs -p)"; exit 143' TERM
        ssh -tt -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$host" "$command" \
            </dev/null > >(sed -u "s/^/$host: /") 2>&1 &
        code=0
        wait $! || code=$?
        echo "$code" >&"$ends"
    } &
    children+=($!)
done
trap 'kill ${arbiter:-} "${children[@]}" 2>/dev/null || true' EXIT

# After one node has failed, the others end by themselves or wait for it forever. They get GRACE_SECONDS (30) to end,
# then this script exits and the trap above stops them.
num_running=${#hosts[@]}
while [[ $num_running -gt 0 ]]; do
    read -ru "$ends" code
    num_running=$((num_running - 1))
    [[ $code == 0 || -n ${MIN_NODES:-} ]] || break
done
deadline=$((SECONDS + ${GRACE_SECONDS:-30}))
while [[ $num_running -gt 0 && $SECONDS -lt $deadline ]]; do
    ! read -t 1 -ru "$ends" _ || num_running=$((num_running - 1))
done
exit "$code"
