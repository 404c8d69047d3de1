#!/usr/bin/env bash
# Runs the command of one task of slurm.sbatch, and notes its exit code: of tasks that fail, and of those that Slurm then
# ends, srun returns the highest code.
trap '' USR1 # nothing of a launch dies of a warning; what its command starts takes it
trap ':' TERM
"$@"
code=$?
echo "$code" >"$ZERO_LAUNCH_NOTES/code.$SLURM_PROCID"
# If a rank was lost with the first node, and with it the shell of the job, Slurm would leave the job without a process.
if [[ $code == 3 || $code == 134 ]]; then
    said=$(LC_ALL=C timeout 10 bash -c "exec 3<>/dev/tcp/${RDZV%:*}/${RDZV##*:}" 2>&1)
    if [[ $? == 124 || $said =~ 'No route to host'|unreachable|'timed out' ]]; then
        echo "launch: ${RDZV%:*} is lost: scontrol requeue $SLURM_JOB_ID" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
