#!/usr/bin/env bash
# Process 1 of a node, which cluster.sh starts in namespaces of its own: a name, a hosts file, a /dev/shm, then slurmd.
set -euo pipefail
folder=$1 name=$2
hostname "$name"
mount --bind "$folder/hosts.$name" /etc/hosts
mount -t tmpfs -o size=1m tmpfs /mnt
mkdir /mnt/cgroup
mount --rbind /sys/fs/cgroup /mnt/cgroup
mount -t sysfs sysfs /sys # of this node's network
mount --rbind /mnt/cgroup /sys/fs/cgroup
mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm
export SLURM_CONF=$folder/slurm.conf
ulimit -c 0
slurmd -D -N "$name" -f "$folder/slurm.conf" &
while :; do # adopts and reaps what jobs leave behind
    wait || true
    sleep 1
done
