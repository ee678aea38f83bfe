"""A server for an ASGI application in a thread."""

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serve(app: Callable[..., Awaitable[None]], port: int = 0, **options: Any) -> Iterator[str]:
    """Serve ``app`` in a thread while the block runs; gives the URL.

    Args:
        app: an ASGI application; its lifespan is not managed.
        port: the port of this machine; 0: one that the system chooses.
        options: others of uvicorn.

    Raises:
        OSError: the port is in use.
    """
    options = {"lifespan": "off", "log_level": "critical", "timeout_graceful_shutdown": 0, **options}
    with socket.create_server(("127.0.0.1", port)) as listening:
        # Inherited by connections. asyncio sets it for sockets that it has made itself; without it, the second part of
        # each answer waits for the acknowledgement of the first, 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=server.run, args=([listening],), name="asgi-server", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
