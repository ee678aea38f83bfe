#!/usr/bin/env bash
# One trainer (rank 0) and its workers (all other ranks), started by torchrun on one node or on several.
#
#   scripts/launch_torchrun.sh 4                          # this machine: a trainer and 4 workers
#   NODES=2 NODE_RANK=0 MASTER=10.0.0.1 scripts/launch_torchrun.sh 4    # on the first node
#   NODES=2 NODE_RANK=1 MASTER=10.0.0.1 scripts/launch_torchrun.sh 4    # on the second: 5 processes on each,
#                                                                       # a trainer and 9 workers in all
#
# Arguments after the number go to train.py: scripts/launch_torchrun.sh 4 env=acrobot collector=distributed_async
set -eu

workers=${1:?"usage: $0 WORKERS [train.py's overrides]"}
shift
cd "$(dirname "$0")/.."

nodes=${NODES:-1}
processes=$((workers + 1)) # on each node
if [ "$nodes" -eq 1 ]; then
    rendezvous=(--standalone)
    host=127.0.0.1
else
    host=${MASTER:?"with several nodes, MASTER is the first one's address"}
    rendezvous=(--nnodes "$nodes" --node-rank "${NODE_RANK:?"0 on the first node, then 1, 2 …"}"
        --master-addr "$host" --master-port "${MASTER_PORT:-29400}")
fi

# Weights and batches come from the first node. Keep both on a private network: nothing is encrypted.
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$processes" train.py \
    weight_sync=distributed weight_sync.host="$host" \
    collector=distributed collector.launcher=join collector.host="$host" \
    num_workers=$((nodes * processes - 1)) "$@"
