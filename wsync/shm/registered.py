"""The user's own TensorDict as the source of a sender (``register_shared_weights``).

Its tensors stay the same objects. After each publish their memory is that of the published slot, so they show what the
workers have. What else refers to the memory that they had before is not followed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from wsync.weights.layout import Buffer


class RegisteredWeights:
    """The registered tensors of one model. Used under the sender's lock.

    Args:
        tensors: by name.

    Attributes:
        tensors: as given.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self._buffer: Buffer | None = None  # its slot is not reused while the tensors lie in it

    def repoint(self, buffer: Buffer) -> None:
        """Let the tensors use the memory of a published slot, which has the values that they were sent, or newer ones.

        A tensor of another shape or dtype, because a transform has changed what is sent, keeps its own memory.
        """
        for name, view in zip(buffer.layout.names, buffer.views, strict=True):
            own = self.tensors.get(name)
            if own is not None and own.shape == view.shape and own.dtype is view.dtype and own.device == view.device:
                own.data = view
        self._buffer = buffer
