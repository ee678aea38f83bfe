"""What an update of the workers' weights costs, by backend, payload and number of workers; beside TorchRL if wanted.

    python scripts/bench_sync.py                                     # everything: 20 minutes or more
    python scripts/bench_sync.py kind=send backends=[shared_mem] mib=[1,64] workers=[2]
    python scripts/bench_sync.py kind=update backends=[ray] peer=torchrl
    python scripts/bench_sync.py --help                              # every setting there is

Every round gives the weights values that they never had, times the call, and then has every worker forward: what it
saw must be exactly those values. If it is not, the case is marked WRONG and the exit status is 1. Each side of a case
(we, and the peer) is a trainer process of its own with its own workers; they take turns in the same run.
"""

if __name__ == "__main__":  # processes that are started import this file too, and have no use for all of it
    from bench.conductor import warm_up

    warm_up()
    from bench.app import main

    main()
