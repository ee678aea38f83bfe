"""A receive of ``torch.distributed`` that a wait with a timeout leaves in progress."""

from __future__ import annotations

import threading

import torch

from wsync.transport import Transfer


class PendingTransfer:
    """A transfer, and a thread that waits for it: gloo gives a group up when a wait of its own times out.

    Args:
        transfer: in progress.
        device: of the buffer that is received into.
    """

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        self._transfer = transfer
        self._device = device
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, name="wsync-pending-transfer", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._transfer.wait()
            if self._device.type == "cuda":  # nccl's wait is one of this thread's stream
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            self._error = error
        self._ended.set()

    def wait(self, timeout: float | None) -> bool:
        """Return whether the transfer was complete within ``timeout`` seconds (None: no limit).

        Raises:
            RuntimeError: it has failed.
        """
        if not self._ended.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True
