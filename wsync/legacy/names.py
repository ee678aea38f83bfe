"""The older API's names of what a transport does, such as ``send_weights(model_id, weights)``."""

from __future__ import annotations

from typing import Any

from wsync.process_group import GroupTransport
from wsync.transport import Transfer


def weights_of(first: Any, second: Any, model_id: str | None = None) -> Any:
    """Return the weights in ``send_weights(weights)`` or, of the older API, ``send_weights(model_id, weights)``.

    Args:
        first: the first argument.
        second: the second one; None if there is none.
        model_id: the model id of the transport's model, where it is known.

    Raises:
        TypeError: two arguments, and the first is no name.
        ValueError: the name is another model's.
    """
    if not isinstance(first, str):
        if second is not None:
            raise TypeError(
                f"send_weights(weights) or send_weights(model_id, weights), not ({type(first).__name__}, …)"
            )
        return first
    if model_id is not None and first != model_id:
        raise ValueError(f"this transport carries the model '{model_id}', not '{first}'")
    return second


class OlderGroupTransport(GroupTransport):
    """A ``GroupTransport`` with the older names, for use without a scheme.

    Args:
        options: as for ``GroupTransport``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sent: list[Transfer] = []

    def send_weights(self, weights: Any, older_weights: Any = None) -> None:
        """See ``GroupTransport``; or, of the older API, ``send_weights(model_id, weights)``."""
        super().send_weights(weights_of(weights, older_weights))

    def send_weights_async(self, weights: Any, older_weights: Any = None) -> None:
        """Begin to send one version, as ``send_weights`` does; ``wait_ack`` waits.

        Raises:
            LayoutMismatch: the weights are not like ``weights_buffer``.
            RuntimeError: the group has broken.
        """
        self.wait_ack()  # the buffer is the same
        self.begin_send(self._packed(weights_of(weights, older_weights)), self._sent)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has begun to send has been sent.

        Raises:
            RuntimeError: the group has broken.
        """
        sent, self._sent = self._sent, []
        for transfer in sent:
            transfer.wait()

    def check_connection(self) -> bool:
        """Return whether the two ends have formed their group."""
        return self._group is not None
