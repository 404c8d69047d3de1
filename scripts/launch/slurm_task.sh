#!/usr/bin/env bash
# Runs the command of one task of slurm.sbatch, and notes its exit code: of tasks that fail, and of those that Slurm then
# ends, srun returns the highest code.
trap '' USR1 # nothing of a launch dies of a warning; what its command starts takes it
trap ':' TERM
"$@"
code=$?
echo "$code" >"$ZERO_LAUNCH_NOTES/code.$SLURM_PROCID"
# If a rank was lost with the first node, and with it the shell of the job, which answers within seconds, Slurm would leave
# the job without a process, or end it minutes later.
if [[ $code == 3 || $code == 134 ]]; then
    for _ in {1..15}; do
        [[ ! -e $ZERO_LAUNCH_NOTES/seen ]] || exit "$code"
        sleep 1
    done
    echo "launch: the shell of the job does not answer: scontrol requeue $SLURM_JOB_ID" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
