"""A trainer in a process of its own, to be killed: `python trainer.py BACKEND FOLDER [RAY ADDRESS]`.

Its workers wait for weights without a limit, and write into FOLDER what they hear when it is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
import crew
from backends import BACKENDS, WORKERS
from contract_models import Small, fill

import wsync


def wait_and_tell(host: Any, path: str) -> None:
    """In a worker: wait for weights that will not come."""
    try:
        host.schemes["policy"].receive(None)
    except wsync.NotConnected as error:
        Path(path).write_text(f"{error}; it acts on {host.models['policy']().tolist()[0]}")
        raise


def main(backend: str, folder: Path, address: str) -> None:
    """Be a trainer until killed."""
    crew.current_kind = WORKERS.get(backend, "process")
    if address:
        import ray_crew

        ray_crew.begin(address)
    with crew.crew(2) as workers, BACKENDS[backend]() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 7), num_workers=2)
        workers.follow(scheme, Small)
        for index, worker in enumerate(workers.workers):
            worker.start("run", wait_and_tell, str(folder / str(index)))
        print(*(worker.process.pid for worker in workers.workers), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    sys.modules["trainer"] = sys.modules["__main__"]
    wait_and_tell.__module__ = "trainer"
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
    os._exit(0)
