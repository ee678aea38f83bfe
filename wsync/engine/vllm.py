"""Stock vLLM, updated by wsync's own connection: the trainer's half, and the entry point by which vLLM finds the rest.

    trainer   publish ─→ POST /start ─→ POST /update ──────────────────→ POST /update {load} ────→ POST /finish
    engine                              each rank fetches the version    each loads it by layers
                                        (shared memory, or a socket)

HTTP carries the phases. The weights of a version go from the trainer to each rank, and are loaded when all have come.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

import wsync
from wsync.deadlines import deadline_in, remaining
from wsync.engine import protocol
from wsync.engine.client import EngineClient, EngineError, Transfer, VersionSource
from wsync.gate import process_gate

MODEL = "engine"  # the name by which both ends know the model


def register() -> None:
    """Register the backend ``wsync``: vLLM calls this in each of its processes (``vllm.general_plugins``)."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory as Factory,
    )

    if "wsync" not in Factory._registry:
        Factory.register_engine("wsync", "wsync.engine.vllm_worker", "WsyncWeightTransferEngine")


class DataScheme(wsync.WeightSyncScheme):
    """Carries the weights: in shared memory on the trainer's machine, else in the messages of the connection.

    Its key is made for one engine, which gets it with the address.
    """

    arena = True

    def __init__(self, host: str | None = None, timeout: float | None = 60.0) -> None:
        super().__init__(initiator="receiver", timeout=timeout)
        self.host = host

    def create_rendezvous(self) -> wsync.Rendezvous:
        return wsync.Rendezvous(self.host)

    def fetch(self, timeout: float | None) -> int:
        """On the receiver: have the newest version arrive, and be verified; ``pull`` installs it. Return its number."""
        assert self._receiver is not None, "init_on_receiver() comes first"
        return self._receiver.fetch(deadline_in(timeout))

    def fetched(self) -> Mapping[str, Tensor]:
        """On the receiver: return the weights of the version that ``fetch`` has had arrive."""
        assert self._receiver is not None
        update = process_gate().call_without_forward(self._receiver.inbox.poll)[-1]
        return dict(zip(update.buffer.layout.names, update.views, strict=True))


class DataTransfer(Transfer):
    """The transfer ``"wsync"`` to one engine: a sender whose workers are the engine's ranks.

    ``host``: the address by which the engine reaches this process; None: the one from which the engine is called.
    """

    def __init__(self, client: EngineClient, source: VersionSource, host: str | None = None) -> None:
        self._client, self._source, self._host = client, source, host
        self._known = True  # what the ranks have done; if not, they are asked by the next init
        self._scheme: DataScheme | None = self._connected()

    def _connected(self) -> DataScheme:
        client = self._client
        ranks = client.get_world_size()
        scheme = DataScheme(self._host or client.own_host, self._time_left())
        scheme.init_on_sender(MODEL, num_workers=ranks)
        layout = base64.b64encode(self._source.layout.encode()).decode()
        accepting = ThreadPoolExecutor(1, "wsync-engine-connect")
        accepted = accepting.submit(scheme.connect)
        try:
            client.init_weight_transfer_engine({"address": scheme._address.dump(), "layout": layout})
            accepted.result()
            return scheme
        except BaseException:
            scheme.shutdown()  # this ends its `connect`
            raise
        finally:
            accepting.shutdown()

    def stage(self) -> None:
        """Have the version where the ranks can fetch it."""
        if not self._known:
            self.shutdown()
        scheme = self._scheme = self._scheme or self._connected()
        scheme.timeout = self._time_left()
        try:
            report = scheme.send(dict(self._source))
        except (wsync.WorkerDied, wsync.NotConnected) as error:
            said = str(error).partition("\n")[0].replace("worker", "rank")
            why = f"the engine has left ({said}): dead, started again, or taken by another trainer? readmit() it"
            raise EngineError(f"{self._client.url}: phase publish: {why}", "died") from error
        assert report is not None, "the scheme waits"
        self._version, self._known = report.version, False

    def prepare(self) -> None:
        """Have every rank fetch the version."""
        self._client.start_weight_update()
        self._update(load=False)
        self._known = True

    def commit(self) -> None:
        began, self._known = time.perf_counter(), False
        self._update(load=True)
        self._client.finish_weight_update()
        self._client.times = 0.0, time.perf_counter() - began
        self._known = True

    def verify(self, digests: Mapping[str, int]) -> None:
        """Have every rank fetch the version again, and look whether loading it would change anything."""
        self.stage()
        info = {"verify": digests, "version": self._version, "timeout": self._time_left()}
        self._client.post("verify", protocol.INIT, {"init_info": info})
        self._known = True

    def _update(self, *, load: bool) -> None:
        self._client.update_weights({"version": self._version, "timeout": self._time_left(), "load": load})

    def abort(self) -> None:
        """Have the ranks put the old weights back."""
        try:
            self._client.post("finish", protocol.FINISH)
        except EngineError as error:
            if "without a matching start" not in str(error):  # of a rank that has ended it
                raise

    def shutdown(self) -> None:
        if self._scheme is not None:
            self._scheme.shutdown()
        self._scheme = None

    def _time_left(self) -> float | None:
        left = remaining(self._client.deadline)
        return None if left is None else max(left, 0.001)
