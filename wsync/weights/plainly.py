"""Doing something as in a thread that has just begun: PyTorch's modes are a thread's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def plainly(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``function`` returns, or raises, outside all modes that the caller may be in.

    Who makes tensors that others will use may do so in a forward: under ``no_grad`` or ``inference_mode``, inside
    ``torch.func.grad``, fed with fake tensors. Not by an executor: those take no work any more once the main thread has
    ended, while others go on.
    """
    made: Future[R] = Future()

    def run() -> None:
        try:
            made.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  raised where somebody waits
            made.set_exception(error)

    thread = threading.Thread(target=run, name="wsync-plainly")
    thread.start()
    thread.join()
    return made.result()
