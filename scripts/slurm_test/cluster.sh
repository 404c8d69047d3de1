#!/usr/bin/env bash
# A real Slurm of three nodes on this machine, as root: each node is a set of namespaces with a name, an address and a
# memory of its own, joined by a bridge. The programs are Debian's: apt-get install slurm-wlm munge iproute2.
#
#   cluster.sh up FOLDER            makes it, in a folder that does not exist yet; 7 s until all nodes are idle
#   cluster.sh kill FOLDER K        takes the power of node K
#   cluster.sh start FOLDER K       gives it back
#   cluster.sh link FOLDER K down   cuts node K from the others; up joins it again
#   cluster.sh down FOLDER          ends what was started, and removes all but the folder
#
# Programs find it by SLURM_CONF=FOLDER/slurm.conf. Without accounting; a lost node is given up after 15 s, and not 300.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=$1 folder=$2
tag=zero$(cksum <<<"$folder" | cut -c 1-5) # of the bridge and the network namespaces: 15 characters are a name at most
nodes=(1 2 3)

join_node() { # the addresses are of a network that a cluster hardly has
    local k=$1
    ip netns add "${tag}n$k"
    ip link add "${tag}v$k" type veth peer name eth0 netns "${tag}n$k"
    ip link set "${tag}v$k" master "${tag}br" up
    ip -n "${tag}n$k" link set lo up
    ip -n "${tag}n$k" addr add "10.77.1.1$k/24" dev eth0
    ip -n "${tag}n$k" link set eth0 up
    # A bridge beside the card, as that of Docker, which launches must not choose.
    ip -n "${tag}n$k" link add docker0 type bridge
    ip -n "${tag}n$k" addr add 172.17.0.1/16 dev docker0
    ip -n "${tag}n$k" link set docker0 up
    printf '127.0.0.1 localhost\n127.0.1.1 n%s\n10.77.1.1 %s\n10.77.1.11 n1\n10.77.1.12 n2\n10.77.1.13 n3\n' \
        "$k" "$(hostname)" >"$folder/hosts.n$k"
    mkdir -p "$folder/spool/n$k"
}

start_node() {
    local k=$1
    setsid nsenter --net="/run/netns/${tag}n$k" unshare --uts --mount --ipc --pid --fork --mount-proc \
        "$here/node.sh" "$folder" "n$k" >"$folder/log/node-n$k.log" 2>&1 </dev/null &
    for _ in {1..50}; do # unshare's child is process 1 of the node
        pgrep -P $! >"$folder/n$k.pid" && return
        sleep 0.1
    done
    return 1
}

case $action in
up)
    mkdir "$folder" && mkdir "$folder"/{log,spool,state,munge}
    chmod 755 "$folder" "$folder/munge"
    sed "s#FOLDER#$folder#g; s#^SlurmctldHost=.*#SlurmctldHost=$(hostname)(10.77.1.1)#" "$here/slurm.conf" >"$folder/slurm.conf"
    printf 'AutoDetect=off\nNodeName=n[1-3] Name=gpu File=/dev/tty[1-2]\n' >"$folder/gres.conf"
    export SLURM_CONF=$folder/slurm.conf
    ip link add "${tag}br" type bridge
    ip addr add 10.77.1.1/24 dev "${tag}br"
    ip link set "${tag}br" up
    head -c 1024 /dev/urandom >"$folder/munge/key"
    chmod 600 "$folder/munge/key"
    munged --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munge/pid" \
        --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --force 2>>"$folder/log/munged.log"
    slurmctld
    for k in "${nodes[@]}"; do
        join_node "$k"
        start_node "$k"
    done
    for _ in {1..60}; do
        [[ $(sinfo -h -o %T) != idle ]] || exit 0
        sleep 0.5
    done
    echo "error: the nodes are not idle after 30 s; see $folder/log" >&2
    exit 1
    ;;
kill) kill -9 "$(<"$folder/n$3.pid")" ;;
start) start_node "$3" ;;
link) ip link set "${tag}v$3" "$4" ;;
down)
    for pid in "$folder"/n?.pid "$folder"/slurmctld.pid "$folder"/munge/pid; do
        [[ ! -s $pid ]] || kill -9 "$(<"$pid")" 2>/dev/null || true
    done
    for k in "${nodes[@]}"; do ip netns del "${tag}n$k" 2>/dev/null || true; done
    ip link del "${tag}br" 2>/dev/null || true
    ;;
esac
