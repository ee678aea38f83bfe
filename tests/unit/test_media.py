"""The media, each with its two ends over a real connection, without a scheme around them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from wsync.control.session import checksum_of
from wsync.control.wire import Link, Offer, Sent, Side, SocketStream
from wsync.media.group import GroupMedium
from wsync.media.transport import TransportMedium
from wsync.transport import TransportBackend
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy

KEYS = (b"a" * 32, b"b" * 32)
TIMEOUT = 60.0


def buffer_of(value: float, size: int = 1000) -> Buffer:
    weights = {"w": torch.full((size,), value)}
    layout = Layout.of(snapshot(weights))
    buffer = Buffer.new(layout)
    buffer.pack(layout.order(snapshot(weights)))
    return buffer


def offer_of(version: int, buffer: Buffer) -> Offer:
    return Offer(version, buffer.layout.nbytes, checksum_of(buffer.memory, b""))


async def link_over(sock: socket.socket, end: str) -> Link:
    sock.setblocking(False)
    _, stream = await asyncio.get_running_loop().create_connection(SocketStream, sock=sock)
    return Link(stream, end, KEYS if end == "trainer" else KEYS[::-1])


async def read(link: Link, medium: Any, on_offer: Callable[[Offer], Awaitable[None]]) -> None:
    """Give a medium its messages, as a session does, until the connection ends; then end the medium."""
    receiving: list[asyncio.Future[None]] = []
    with suppress(ConnectionError):
        while True:
            match await link.receive():
                case Side(data):
                    medium.on_side(data)
                case Sent(version, error):
                    medium.on_sent(version, error)
                case Offer() as offer:
                    receiving.append(asyncio.ensure_future(on_offer(offer)))
    medium.close()
    await asyncio.gather(*receiving, medium.wait_closed(), return_exceptions=True)


async def send(medium: Any, link: Link, version: int, buffer: Buffer) -> Any:
    """Send a version; return the error of ``send``."""
    try:
        await medium.send(link, offer_of(version, buffer), buffer)
    except Exception as error:  # noqa: BLE001
        return error


# --- a user's transport: both ends in this process ---


class Queued(TransportBackend):
    """Weights through a queue that several versions may wait in; ``send_weights`` and the set-up raise what is set."""

    def __init__(self, items: queue.Queue[Any]) -> None:
        self.items, self.error, self.setup_error = items, None, None
        self.blocked, self.closed = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if self.setup_error is not None:
            raise self.setup_error

    def send_weights(self, weights: Any) -> None:
        self.threads.add(threading.current_thread().name)
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.items.put({name: tensor.clone() for name, tensor in weights.items()})

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any:
        self.blocked.set()
        try:
            item = self.items.get(timeout=timeout)
        except queue.Empty:
            return None
        if item is None:
            raise ConnectionError("closed")
        return item

    def close(self) -> None:
        self.closed.set()
        self.items.put(None)


class Ends:
    """Both ends of a connection with a ``Queued`` transport each."""

    def __init__(self, timeout: float | None = TIMEOUT) -> None:
        items = queue.Queue[Any]()
        self.transports = Queued(items), Queued(items)
        self.media = [TransportMedium(lambda t=t: t, WeightStrategy("state_dict"), 0, timeout) for t in self.transports]
        self.received = asyncio.Queue[Any]()

    async def __aenter__(self) -> Ends:
        near, far = socket.socketpair()
        self.links = [await link_over(near, "trainer"), await link_over(far, "worker")]
        self.tasks = [
            asyncio.ensure_future(read(link, medium, self.take))
            for link, medium in zip(self.links, self.media, strict=True)
        ]
        return self

    async def take(self, offer: Offer) -> None:
        into = buffer_of(0.0)
        try:
            await self.media[1].receive(self.links[1], offer, into)
        except Exception as error:  # noqa: BLE001
            self.received.put_nowait(error)
        else:
            self.received.put_nowait(into.views[0][0].item())

    async def __aexit__(self, *_: object) -> None:
        for link in self.links:
            link.close(ConnectionError("the end"))
        await asyncio.gather(*self.tasks)
        assert all(transport.closed.is_set() for transport in self.transports)

    async def send(self, version: int, value: float) -> Any:
        return await send(self.media[0], self.links[0], version, buffer_of(value))


def own_threads() -> set[threading.Thread]:
    """Return the library's threads; a transport of an earlier test may keep one for ever."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("wsync-")}


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(TIMEOUT):
            await test()

    asyncio.run(limited())


def test_a_transport_carries_updates_and_older_ones_are_skipped() -> None:
    before = own_threads()

    async def test() -> None:
        async with Ends() as ends:
            assert await ends.send(1, 1.0) is None and await ends.received.get() == 1.0
            ends.transports[0].items.put({"w": torch.full((1000,), -1.0)})  # of an update that failed
            assert await ends.send(2, 2.0) is None and await ends.received.get() == 2.0
            assert ends.transports[0].threads == {"wsync-transfer"}
            assert ends.transports[1].threads == {"wsync-transport-setup"}
        assert own_threads() <= before

    run(test)


@pytest.mark.parametrize("error", [ArithmeticError("no room"), SystemExit("no room")])
def test_after_an_error_of_send_weights_the_connection_goes_on(error: BaseException) -> None:
    async def test() -> None:
        async with Ends() as ends:
            ends.transports[0].error = error
            assert "no room" in str(await ends.send(1, 1.0)) and "no room" in str(await ends.received.get())
            for version in (2, 3):
                assert await ends.send(version, float(version)) is None and await ends.received.get() == version

    run(test)


def test_a_connection_error_of_send_weights_and_a_failed_set_up_end_the_connection() -> None:
    async def test() -> None:
        async with Ends() as ends:
            ends.transports[0].error = BrokenPipeError("cut")
            assert isinstance(await ends.send(1, 1.0), BrokenPipeError)
        async with Ends() as ends:
            ends.transports[1].setup_error = TypeError("wrong")
            await ends.send(1, 1.0)
            assert isinstance(await ends.received.get(), TypeError)
            await asyncio.gather(*ends.tasks)

    run(test)


def test_wrong_weights_are_an_error_and_the_end_of_the_connection_ends_a_receive() -> None:
    async def test() -> None:
        async with Ends(timeout=None) as ends:
            ends.transports[0].send_weights = lambda weights: [  # pyright: ignore[reportAttributeAccessIssue]
                ends.transports[0].items.put({"w": torch.full((1000,), -1.0)}) for _ in range(3)
            ]
            assert await ends.send(1, 1.0) is None
            assert "another checksum" in str(await ends.received.get())
            ends.transports[1].blocked.clear()
            ends.transports[0].send_weights = lambda weights: None  # pyright: ignore[reportAttributeAccessIssue]
            ends.transports[0].items.queue.clear()
            await ends.send(2, 2.0)
            await asyncio.to_thread(ends.transports[1].blocked.wait, TIMEOUT)
            ends.links[0].close(ConnectionError("the trainer has gone"))
            assert isinstance(await ends.received.get(), ConnectionError)

    run(test)


# --- a process group: the worker is another process ---


def follow(sock: socket.socket, size: int, report: Any, stall: Any) -> None:
    """Be a worker: receive updates, and report their values and what receives raise."""

    async def live() -> None:
        link, medium = await link_over(sock, "worker"), GroupMedium(inline_bytes=100, timeout=TIMEOUT)

        async def take(offer: Offer) -> None:
            into = buffer_of(0.0, size)
            if stall.is_set():
                await asyncio.sleep(3600.0)
            try:
                await medium.receive(link, offer, into)
                report.put(into.views[0].unique().tolist())
            except ConnectionError as error:
                report.put(str(error))

        await read(link, medium, take)

    asyncio.run(live())


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    paths = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    inodes = {path.stat().st_ino for path in paths if path.exists()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and int(row[9]) in inodes}


def test_a_group_carries_updates_refuses_strangers_and_ends_with_its_connection() -> None:
    context, size = multiprocessing.get_context("forkserver"), 1 << 22
    near, far = socket.socketpair()
    report, stall, ports, before = context.Queue(), context.Event(), listening_ports(), own_threads()
    worker = context.Process(target=follow, args=(far, size, report, stall), daemon=True)
    worker.start()
    far.close()

    async def test() -> None:
        link, medium = await link_over(near, "trainer"), GroupMedium(inline_bytes=100, timeout=TIMEOUT)
        reading = asyncio.ensure_future(read(link, medium, lambda _: asyncio.sleep(0)))
        for version in (1, 2, 3):
            assert await send(medium, link, version, buffer_of(float(version), size)) is None
            assert await asyncio.to_thread(report.get, timeout=TIMEOUT) == [version]
        (port,) = listening_ports() - ports
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):  # strangers: the port takes no connection any more
            stranger = socket.socket()
            stranger.settimeout(0.05)
            with pytest.raises(TimeoutError):
                stranger.connect(("127.0.0.1", port))
            stranger.close()
        assert len(os.listdir("/proc/self/fd")) == before
        stall.set()  # the worker does not receive: the end of the connection ends the send
        sending = asyncio.ensure_future(send(medium, link, 4, buffer_of(4.0, size)))
        await asyncio.wait([sending], timeout=0.2)
        assert not sending.done()
        link.close(ConnectionError("the end"))
        assert isinstance(await sending, ConnectionError)
        await reading

    try:
        run(test)
        deadline = time.monotonic() + TIMEOUT
        while own_threads() - before or listening_ports() - ports:
            assert time.monotonic() < deadline, "a thread that waits in gloo does not end, or gloo's port is open"
            time.sleep(0.01)
    finally:
        worker.kill()
        worker.join()
        near.close()
