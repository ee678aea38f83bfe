#!/usr/bin/env bash
# A sweep on Slurm: one job for each run, submitted by Hydra's submitit launcher. Needs the extra:
#   pip install -e '.[slurm]'
#
#   PARTITION=cpu scripts/launch_slurm.sh weight_sync=shared_mem,multiprocess,distributed seed=0,1,2
#   PARTITION=cpu LAUNCHER=submitit_local scripts/launch_slurm.sh seed=0,1      # the same without Slurm, to try it
#
# Each job has one node: a trainer and num_workers workers. For a run on several nodes, have srun start
# scripts/launch_torchrun.sh once on each (NODES, NODE_RANK and MASTER from Slurm's SLURM_* variables).
set -eu

cd "$(dirname "$0")/.."
launcher=${LAUNCHER:-submitit_slurm}
cpus=${CPUS:-4} # of each job: the trainer's, and one for each worker
minutes=${MINUTES:-60}

if ! "${PYTHON:-python}" -c 'import hydra_plugins.hydra_submitit_launcher' 2>/dev/null; then
    echo "$0: Hydra's submitit launcher is not installed: pip install -e '.[slurm]'" >&2
    exit 1
fi
settings=("hydra/launcher=$launcher" "hydra.launcher.cpus_per_task=$cpus" "hydra.launcher.timeout_min=$minutes")
if [ "$launcher" = submitit_slurm ]; then
    settings+=("hydra.launcher.partition=${PARTITION:?"the Slurm partition to submit to"}")
fi
exec "${PYTHON:-python}" train.py -m "${settings[@]}" "$@"
