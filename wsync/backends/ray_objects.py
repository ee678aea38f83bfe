"""Weights through Ray's object store: one ``ray.put`` per update, whatever the number of actors.

    trainer   ray.put(packed weights) ─→ reference ─→ mailbox (an actor, one slot per worker)
    worker    mailbox ─→ reference ─→ ray.get: Ray brings one copy to each node, which its workers read in place

The mailbox exists so that references are passed as arguments and results of calls: Ray then counts them, and frees an
object when a newer one has taken its place in every slot and it is none of the trainer's newest four. What a worker
reads is compared with the checksum that came over the authenticated connection to the trainer.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from hashlib import sha256
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError
from torch import Tensor, nn

from wsync.backends.ray_actors import connection
from wsync.control.settings import SenderSettings, layout_in
from wsync.deadlines import deadline_in, remaining
from wsync.gate import process_gate
from wsync.transport import TransportBackend
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy

_CALLS = 100_000  # of a mailbox at a time: those of workers wait there, and the trainer's need room
_RECENT = 4  # newest updates; the trainer keeps their references for workers that are sent them late
_NAMESPACE = "wsync"  # of the mailboxes: a worker may be of another namespace than the trainer
_Boxed = list[Any]  # a reference in a list, which Ray passes as it is; empty: nothing was sent


def mailbox_name(token: bytes) -> str:
    """Return the name of a scheme's mailbox. It does not reveal the token, which authenticates connections."""
    return f"wsync-{sha256(token).hexdigest()[:32]}"


def mailbox_class() -> type:
    """Return the class of the actor that has the newest reference for each worker.

    Ray copies a class of a function to the actor's process, which would import a module's class, and torch with it:
    seconds, and 300 MiB.
    """

    class Mailbox:
        def __init__(self) -> None:
            self._slots: dict[int, tuple[tuple[str, int], _Boxed]] = {}
            self._life = secrets.token_hex(8)  # another one after a restart
            self._number = 0
            self._changed = asyncio.Condition()

        async def put(self, worker: int, boxed: _Boxed) -> None:
            """Take the place of what is in a worker's slot, under the next number."""
            async with self._changed:
                self._number += 1
                self._slots[worker] = (self._life, self._number), boxed
                self._changed.notify_all()

        async def get(self, worker: int, last: tuple[str, int]) -> tuple[tuple[str, int], _Boxed]:
            """Return what is in a worker's slot, and its number; waits until that is another one than ``last``."""
            async with self._changed:
                await self._changed.wait_for(lambda: worker in self._slots and self._slots[worker][0] != last)
                return self._slots[worker]

    return Mailbox


class ObjectPublisher:
    """The trainer's end, for all workers of a scheme: puts each update into the object store once. Any thread calls.

    Args:
        name: the name of the mailbox, which this object starts.
    """

    def __init__(self, name: str) -> None:
        options: dict[str, Any] = {"name": name, "namespace": _NAMESPACE, "num_cpus": 0, "max_concurrency": _CALLS}
        # A mailbox that has died begins without references: the next update brings them. An update that it took just
        # before its end fails on the workers that had not fetched it.
        options |= {"max_restarts": -1, "max_task_retries": -1}
        self._mailbox: Any = ray.remote(mailbox_class()).options(**options).remote()
        self._connection = connection()
        self._lock = threading.Lock()
        self._recent: deque[tuple[Any, Any]] = deque(maxlen=_RECENT)  # weights as they were given, reference
        self._packed: tuple[Layout, bytes] | None = None

    @property
    def mailbox(self) -> Any:
        """The mailbox.

        Raises:
            ConnectionError: Ray was shut down meanwhile. (A call would start another Ray.)
        """
        if self._connection != connection():
            raise ConnectionError("ray.shutdown() was called, and has ended the mailbox of this scheme")
        return self._mailbox

    def reference(self, weights: Any) -> Any:
        """Return the reference of ``weights``; the same object again has the same reference."""
        with self._lock:
            for known, reference in self._recent:
                if known is weights:
                    return reference
            reference = ray.put(self._content(weights))
            self._recent.append((weights, reference))
            return reference

    def _content(self, weights: Any) -> tuple[bytes, np.ndarray]:
        """Return the layout as JSON, and the packed weights ``uint8[nbytes]``."""
        given = snapshot(weights)
        if self._packed is None or set(self._packed[0].names) != given.tensors.keys():
            layout = Layout.of(given)
            self._packed = layout, SenderSettings(layout, checksum=True).dump()
        layout, settings = self._packed
        tensors = layout.order(given)
        flat = _packed_already(layout, tensors)
        if flat is None:
            buffer = Buffer.new(layout)
            buffer.pack(tensors)
            flat = buffer.flat
        return settings, flat.numpy()

    def close(self) -> None:
        """End the mailbox; Ray frees the objects."""
        self._recent.clear()
        if self._connection == connection():
            ray.kill(self._mailbox)


def _packed_already(layout: Layout, tensors: list[Tensor]) -> Tensor | None:
    """Return the buffer ``uint8[nbytes]`` that ``tensors`` are views of, each at its place; None if there is none."""
    storage = tensors[0].untyped_storage()
    start = storage.data_ptr()
    if storage.nbytes() != layout.nbytes or storage.device.type != "cpu":
        return None
    for tensor, (offset, nbytes), strides in zip(tensors, layout.byte_ranges, layout.strides, strict=True):
        if nbytes and (tensor.data_ptr() != start + offset or tensor.stride() != strides):
            return None
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class RayObjectTransport(TransportBackend):
    """Weights through Ray's object store, to one worker. A ``TransportBackend``.

    Args:
        mailbox: the name of the mailbox.
        worker_idx: the worker.
        publisher: on the sender; None in a worker.
    """

    def __init__(self, mailbox: str, worker_idx: int, publisher: ObjectPublisher | None = None) -> None:
        self._name = mailbox
        self._worker = worker_idx
        self._publisher = publisher
        self._mailbox: Any = None
        self._seen = ("", 0)  # the number of what was taken last
        self._closed = Future[None]()  # its end ends a wait
        self._layout: tuple[bytes, Layout] | None = None

    def send_weights(self, weights: Any) -> None:
        """Put ``weights`` into the object store, unless another worker's transport has, and tell the worker.

        Raises:
            RuntimeError: this transport is a worker's.
            ConnectionError: it was closed, or Ray was shut down, meanwhile.
            ray.exceptions.RayError: Ray has failed.
        """
        if self._publisher is None:
            raise RuntimeError("this transport is a worker's")
        mailbox, boxed = self._publisher.mailbox, list[Any]()
        try:
            boxed = [self._publisher.reference(weights)]
        finally:  # also if it failed: the worker waits
            self._result(mailbox.put.remote(self._worker, boxed), None)

    def _result(self, call: Any, deadline: float | None) -> Any:
        """Return the result of a call of the mailbox.

        Raises:
            GetTimeoutError: there is none at the deadline.
            ConnectionError: this transport was closed meanwhile.
            ray.exceptions.RayError: the call has failed.
        """
        ended: Future[Any] = call.future()
        wait([ended, self._closed], remaining(deadline), FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        if self._closed.done():
            raise ConnectionError("this transport was closed")
        raise GetTimeoutError

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> None:
        """Find the mailbox.

        Raises:
            ValueError: there is none of this name: the sender has gone, or is in another cluster.
            ConnectionError: Ray is not initialised in this process. (A call would start another Ray.)
        """
        if not ray.is_initialized():
            raise ConnectionError("Ray is not initialised in this process: join the sender's cluster by ray.init()")
        self._mailbox = ray.get_actor(self._name, namespace=_NAMESPACE)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the newest weights; None if none newer than the last ones came within ``timeout`` seconds.

        Raises:
            ConnectionError: the sender has gone, or this transport was closed (which ends no ``ray.get``).
            ray.exceptions.RayError: the object was lost, for instance because the sender went while it was fetched.
        """
        deadline = deadline_in(timeout)
        try:
            number, boxed = self._result(self._mailbox.get.remote(self._worker, self._seen), deadline)
            settings, content = ray.get(boxed[0], timeout=remaining(deadline)) if boxed else (b"", None)
            self._seen = number  # last: after a timeout the next call fetches the same version again
            if content is None:
                return None
        except GetTimeoutError:
            return None
        except RayActorError as error:
            raise ConnectionError(f"the sender has gone: {error}") from error
        if self._layout is None or self._layout[0] != settings:
            self._layout = settings, layout_in(settings)
        layout = self._layout[1]
        chosen, received = strategy or WeightStrategy(), dict(zip(layout.names, _views(layout, content), strict=True))
        if model is not None:
            process_gate().call_without_forward(chosen.apply_weights, model, received)
        if weights is None:
            return chosen.extract_weights({name: tensor.clone() for name, tensor in received.items()})
        chosen.apply_weights(weights, received)
        return weights

    def close(self) -> None:
        """End a call that waits for the mailbox. Idempotent."""
        with suppress(InvalidStateError):  # it was closed before
            self._closed.set_result(None)


def _views(layout: Layout, content: np.ndarray) -> tuple[Tensor, ...]:
    """Return the tensors in a packed version that lies in the object store, valid as long as ``content``.

    They must not be written. PyTorch has no read-only tensors, and would warn of every array that is.
    """
    if content.nbytes != layout.nbytes:
        raise ValueError(f"the version has {content.nbytes} bytes, and its layout {layout.nbytes}")
    memory = (ctypes.c_uint8 * content.nbytes).from_address(content.ctypes.data)
    return layout.views(torch.frombuffer(memory, dtype=torch.uint8))
