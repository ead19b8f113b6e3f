#!/usr/bin/env bash
# Two machines with eight GPUs each, one process per machine: sbatch docs/slurm.sh configs/small/cc.yaml
#SBATCH --job-name=ddl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

# run_dir lies on a filesystem that all machines see. SIGTERM comes 300 seconds before the time is up: all processes stop
# at the same step and save (exit code 3). The same script again goes on from there.
srun --kill-on-bad-exit=1 .venv/bin/python train.py --config "$1" "${@:2}" \
  --run_dir "${RUN_DIR:-$HOME/runs/$(basename "$1" .yaml)}" \
  --distributed.mode auto
