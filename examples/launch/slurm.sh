#!/bin/bash
# sbatch examples/launch/slurm.sh: two nodes with four GPUs each, one pipeline of eight ranks.
#SBATCH --job-name=fastpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
SCRIPT=${SCRIPT:-examples/train_gpt.py}
PROCESSES=${PROCESSES:-4} # on each node
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / PROCESSES > 0 ? ${SLURM_CPUS_PER_TASK:-1} / PROCESSES : 1))

# One agent for each node. A failed attempt is started again on all nodes, from the newest complete checkpoint; a job
# that is requeued goes on from it, too.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$PROCESSES" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${PORT:-29500}" \
    --max-restarts "${RESTARTS:-2}" \
    "$SCRIPT" "$@"
