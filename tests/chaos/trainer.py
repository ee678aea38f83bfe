"""A trainer in a process of its own, to be killed: `python trainer.py BACKEND FOLDER [RAY ADDRESS]`.

Its workers wait for weights without a limit, and write to FOLDER what ``receive`` raises when it is gone.
"""

import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "chaos"), str(TESTS / "contract"), str(TESTS)]

from wsync.testing.commands import WorkerState  # noqa: E402


def wait_for_the_end(state: WorkerState, path: str) -> None:
    """In a worker: wait for weights that will not come."""
    import wsync

    try:
        while state.schemes["policy"].receive(None) is not None:
            continue
    except wsync.NotConnected as error:
        used = time.process_time()
        time.sleep(0.3)  # nothing is left to do: no thread is busy
        busy = time.process_time() - used > 0.05
        Path(path).write_text(f"{error}; it acts on {state.models['policy']().tolist()[0]}{', and is busy' * busy}")
        raise


def main(name: str, folder: Path, address: str) -> None:
    """Connect two workers, print their process ids, and wait to be killed."""
    from conftest import make_backend

    if address:
        import ray_workers

        ray_workers.start_cluster(address)
        ray_workers.SPARE_ACTORS = 0  # no other test comes
    with make_backend(name).connected() as session:
        session.send(7)
        session.outputs()
        for index, worker in enumerate(session.workers):
            worker.start(wait_for_the_end, str(folder / str(index)))
        print(*(worker.pid for worker in session.workers), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    import trainer  # its functions are pickled by this name

    trainer.main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
