#!/usr/bin/env bash
# Training with Ray actors as workers, on one machine or on a cluster.
#
#   scripts/launch_ray.sh run num_workers=4              # one machine: Ray starts and ends with the run
#   scripts/launch_ray.sh head                           # a cluster: on the first node …
#   HEAD=10.0.0.1:6379 scripts/launch_ray.sh worker      # … on every other one …
#   HEAD=10.0.0.1:6379 scripts/launch_ray.sh run num_workers=16 'collector.resources={num_cpus:1}'
#   scripts/launch_ray.sh stop                           # … and on each, when all is done: ends all Ray processes of
#                                                        # yours there
#
# Every node needs this project where its Python finds it, and the cluster's token: copy ~/.ray/auth_token from the first
# node, or set RAY_AUTH_TOKEN. RAY_AUTH_MODE=disabled does without: then a node accepts every process that reaches its ports.
set -eu

what=${1:?"usage: $0 head | worker | run [train.py's overrides] | stop"}
shift
cd "$(dirname "$0")/.."
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

case $what in
head)
    if [ "$RAY_AUTH_MODE" = token ]; then
        ray get-auth-token --generate >/dev/null # unless there is one
    fi
    exec ray start --head --port "${PORT:-6379}" --disable-usage-stats "$@"
    ;;
worker)
    exec ray start --address "${HEAD:?"the head's address, host:port"}" --disable-usage-stats "$@"
    ;;
run)
    if [ -n "${HEAD:-}" ]; then
        # Weights go from the trainer's node to all others: they must reach it under its address in the cluster.
        set -- "collector.address='$HEAD'" weight_sync.host=node collector.scheduling_strategy=SPREAD "$@"
    fi
    exec "${PYTHON:-python}" train.py weight_sync=ray collector=ray "$@"
    ;;
stop)
    exec ray stop
    ;;
*)
    echo "$0: $what is none of head, worker, run, stop" >&2
    exit 2
    ;;
esac
