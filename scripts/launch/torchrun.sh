#!/usr/bin/env bash
# Trains on one node, or on several if it is started on each of them. Arguments are those of pretrain_gpt.py.
#
#   scripts/launch/torchrun.sh --config configs/quickstart.yaml                                  # this node, all GPUs
#   NNODES=2 RDZV=node0:29500 scripts/launch/torchrun.sh --config configs/quickstart.yaml        # the same on both
#
#   NNODES             nodes of the job (1)
#   RDZV               HOST:PORT of the node to which all connect; PORT and the next port must be free there
#   NODE_RANK          number of this node; needed only for more than two nodes with CHECK=0
#   RANKS_PER_NODE     ranks of a node (as many as it has GPUs, or 2 without GPUs)
#   MAX_RESTARTS       restarts after failures (0; with MIN_NODES 3, since the last progress)
#   MIN_NODES          goes on without nodes that are lost, on at least so many; NODE_NAMES has the names of all
#   ARBITER            with MIN_NODES: HOST:PORT of a process outside of the nodes that lets half of them go on
#   NO_ARBITER         1: half of the nodes, or fewer, go on by themselves: the others may do so too if the network parts
#   CHECK              0 skips the checks before the start
#   PREFLIGHT_SECONDS  time that these wait for the other nodes (120)
#   HEALTH             1 measures all devices and links first, for about a minute, and names what is slow or computes wrong
#   LOGS               folder for a log of each rank (run.dir/logs, if there are several nodes or no terminal); none: no logs
#
# The exit code is that of the rank that failed first.
set -euo pipefail
# A scheduler sends its warnings (USR1) and TERM to this process, and often to all others of the job: none may die of
# them. The launcher takes them, and until then slurm.sbatch sends them again.
trap '' USR1
if [[ -n ${SLURM_JOB_ID:-} ]]; then trap '' TERM; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -n ${PYTHON:-} ]] || source scripts/setup.sh
python=${PYTHON:-python}

nnodes=${NNODES:-1}
rdzv=${RDZV:-localhost:29500}
num_gpus=${SLURM_GPUS_ON_NODE:-$( (timeout 60 nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU ' || true)}
source scripts/launch/environment.sh
ranks=${RANKS_PER_NODE:-$((num_gpus > 0 ? num_gpus : 2))}

# Torch's static rendezvous unpickles nothing of its store, which has no password, but needs the number of each node,
# and cannot restart the ranks of several nodes.
launch=("$python" -m parallel.launch --nnodes="$nnodes" --nproc-per-node="$ranks" --local-addr="$local_address")
if [[ $nnodes -gt 1 && ${MAX_RESTARTS:-0} -gt 0 && -z ${MIN_NODES:-} ]]; then
    launch+=(--rdzv-backend=c10d --rdzv-endpoint="$rdzv" --rdzv-conf="is_host=$is_host")
elif [[ $is_host == 1 ]]; then
    launch+=(--master-addr="$local_address" --master-port="${rdzv##*:}")
else
    launch+=(--master-addr="${rdzv%:*}" --master-port="${rdzv##*:}")
fi
node_rank=${NODE_RANK:-${SLURM_NODEID:-}}
if [[ $nnodes -le 2 ]]; then node_rank=$((1 - is_host)); fi

# Measures all devices and links, by all ranks; prints the nodes that are left if it is given the names of all.
health() { "${launch[@]}" --node-rank="$node_rank" --rdzv-id=health -m lab.measure.health "$@" | sed -n 's/^nodes left: //p'; }

# After the loss of a node, the agents of the others start their ranks again. They compare the nodes before each start.
if [[ -n ${MIN_NODES:-} ]]; then
    if [[ ${HEALTH:-0} == 1 ]]; then
        NODE_NAMES=$(health --nodes "${NODE_NAMES:?names of all nodes, separated by commas}")
        [[ -n $NODE_NAMES ]] || exit 0 # this node is at fault
    fi
    command=("$python" -m gpt.elastic --nodes "${NODE_NAMES:?names of all nodes, separated by commas}"
        --port "${rdzv##*:}" --num_ranks "$ranks" --min_nodes "$MIN_NODES" --max_restarts "${MAX_RESTARTS:-3}"
        --check "${CHECK:-1}" --wait "${PREFLIGHT_SECONDS:-120}" ${ARBITER:+--arbiter "$ARBITER"}
        --no_arbiter "${NO_ARBITER:-0}" ${LOGS:+--logs "$LOGS"} -- pretrain_gpt.py "$@")
    echo "+ ${command[*]}" >&2
    exec "${command[@]}"
fi

# Check that all nodes are present, with the same code, data and settings, with clocks that agree and disks that work.
logs=${LOGS:-}
if [[ ${CHECK:-1} == 1 ]]; then
    printed=$("$python" -m gpt.preflight --nodes "$nnodes" --num_ranks "$((nnodes * ranks))" \
        --meet "${rdzv%:*}:$((${rdzv##*:} + 1))" --names "${NODE_NAMES:-}" --wait "${PREFLIGHT_SECONDS:-120}" -- "$@")
    { IFS= read -r folder && read -r number; } <<<"$printed" || true
    node_rank=${node_rank:-$number}
    if [[ -z $logs && -n $folder && ($nnodes -gt 1 || ! -t 1) ]]; then logs=$folder/logs; fi
fi
[[ -n $node_rank ]] || {
    echo "error: NNODES=$nnodes with CHECK=0 needs the number of each node: set NODE_RANK, 0 on the node of RDZV" >&2
    exit 2
}

[[ ${HEALTH:-0} != 1 ]] || health

# Torchrun itself must not handle TERM under a scheduler: it would end the ranks that still save.
signals=SIGTERM,SIGINT,SIGHUP,SIGQUIT
if [[ -n ${SLURM_JOB_ID:-} ]]; then signals=SIGINT; fi

command=("${launch[@]}" --node-rank="$node_rank" --max-restarts="${MAX_RESTARTS:-0}" --rdzv-id="${RDZV_ID:-train}"
    --signals-to-handle="$signals")
if [[ -n $logs && $logs != none ]]; then
    command+=(--tee=3 --log-dir="$logs/$(hostname)")
fi
command+=(pretrain_gpt.py "$@")
echo "+ ${command[*]}" >&2
exec "${command[@]}"
