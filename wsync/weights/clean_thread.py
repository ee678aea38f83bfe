"""Running a function outside all PyTorch modes of the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_clean_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what ``function`` returns, or raise what it raises, in a thread of its own.

    Modes such as ``no_grad``, ``inference_mode``, ``torch.func.grad`` and fake tensors belong to a thread; tensors that
    other threads will use must not be made under them. An executor would refuse work once the main thread has ended.
    """
    outcome: Future[R] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="wsync-clean")
    thread.start()
    thread.join()
    return outcome.result()
