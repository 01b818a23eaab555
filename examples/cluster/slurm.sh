#!/bin/bash
# Slurm: sbatch examples/cluster/slurm.sh my.toml /shared/runs/big
# One torchrun per machine. Two minutes before the time is over the run saves itself and the job is put back into the
# queue, where the same line goes on with it; the folder must be one that all machines share.
#SBATCH --job-name=foretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Seconds that torchrun gives the ranks to save
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
config=$1
out=$2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  -m foretrain train "$config" --out "$out" --resume

if grep -q '"reason": "interrupted"' "$out/summary.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
