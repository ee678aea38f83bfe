"""Ray actors as the workers of a standalone send."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
import torch

import wsync
from bench.cases import Case
from bench.crews import Lines
from bench.hands import obey
from bench.models import Revealing
from collectors.distributed.ray_cluster import Cluster


class Hand:
    """An actor with a model, which the sender has join by itself.

    Args:
        case: what is measured.
    """

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self.policy = Revealing(case.mib, case.tensors, -1.0)

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def serve(self, path: str) -> None:
        """Obey the trainer, who listens at ``path``, until it has had enough."""
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(path)
            line = Connection(door.detach())
        with closing(line), suppress(EOFError, ConnectionError):
            obey(line, self.policy)
            line.send("left")


class RayCrew:
    """Actors that wait for a scheme.

    Args:
        actors: by index.
        timeout: seconds for whatever it waits for.
        stack: closes what it opens.
    """

    def __init__(self, actors: Sequence[Any], timeout: float, stack: ExitStack) -> None:
        self._actors, self._timeout, self._stack = actors, timeout, stack
        self.pids: Sequence[int] = ray.get([actor.pid.remote() for actor in actors], timeout=timeout)

    def connect(self, scheme: wsync.WeightSyncScheme, model: Revealing) -> Lines:
        """See Crew. The scheme's calls to the actors come before, and after, the one that serves."""
        assert isinstance(scheme, wsync.RayWeightSyncScheme)
        scheme.init_on_sender("policy", model=model, actors=self._actors)
        scheme.connect()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        lines = []
        for actor in self._actors:
            path = str(Path(folder) / str(len(lines)))
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(path)
                door.listen(1)
                door.settimeout(self._timeout)
                actor.serve.remote(path)
                line, _ = door.accept()
            line.setblocking(True)
            lines.append(self._stack.enter_context(closing(Connection(line.detach()))))
        return Lines(lines, self._timeout)


@contextmanager
def ray_crew(case: Case) -> Iterator[RayCrew]:
    """Actors of a cluster of their own."""
    with closing(Cluster("local")), ExitStack() as stack:
        remote: Any = ray.remote(Hand).options(num_cpus=0, runtime_env=importing())
        actors = [remote.remote(case) for _ in range(case.workers)]
        yield RayCrew(actors, case.timeout, stack)
        for actor in actors:
            ray.kill(actor)


def importing() -> dict[str, Any]:
    """The environment of actors that import what this process can."""
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}}
