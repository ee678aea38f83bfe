"""Keeps the buffers that the user has registered (``register_shared_weights``) at the version that the workers have.

Buffers in shared memory are written once every worker has acknowledged an update: see ``shm/registered.py``. Buffers in
other memory (``Source.registered_writer``) are written once an update to all workers is published.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from wsync.errors import WeightSyncError
from wsync.sending.in_flight import InFlight
from wsync.sending.membership import Membership
from wsync.sending.source import Source
from wsync.weights.layout import Layout


class RegisteredUpdates:
    """Updates the registered weights of one sender, if it has any.

    Used by the thread that calls the scheme, under the sender's lock.

    Args:
        source: has the buffers.
        members: the workers.
    """

    def __init__(self, source: Source, members: Membership) -> None:
        self._source = source
        self._members = members
        self._lacking = 0  # the version that all workers were sent, and buffers in shared memory lack; 0 for none

    def prepare(
        self,
        update: InFlight,
        weights: object,
        packed: Sequence[Sequence[Tensor]],
        layout: Layout,
        recipients: Collection[int],
    ) -> None:
        """Find out how the buffers will get an update that has been packed.

        Args:
            update: its ``must_copy`` and ``write_registered`` are set.
            weights: as given to ``send``.
            packed: the tensors of each part.
            layout: the layout of the tensors.
            recipients: the workers that get it, now or as their replacements connect.

        Raises:
            LayoutMismatch: the weights do not fit the buffers.
        """
        registered = self._source.shared_buffers
        if registered is not None:
            update.must_copy = len(packed) > 1 or not registered.matches(layout, packed[0])
        elif self._is_everyone(recipients):
            update.write_registered = self._source.registered_writer(weights)

    def _is_everyone(self, workers: Collection[int]) -> bool:
        return len(set(workers)) == self._members.num_workers

    def announce(self, update: InFlight) -> None:
        """If an update was packed from the buffers, record its version there. Called before it is published."""
        if self._source.shared_buffers is not None and not update.must_copy:
            self._source.shared_buffers.set_version(update.version)

    def on_published(self, update: InFlight) -> None:
        """Write buffers outside shared memory; those in it lack the update from now on."""
        if update.write_registered is not None:
            update.write_registered()
            update.write_registered = None
        if len(update.extra) == 1 and self._is_everyone(update.extra[0][0]):
            self._lacking = update.version if update.must_copy else 0

    def on_installed(self, update: InFlight) -> None:
        """Write buffers in shared memory. Called for the newest update, once no present worker lacks it."""
        registered = self._source.shared_buffers
        if registered is None or not update.must_copy:
            return
        if {*self._members.present} <= {*update.workers} and registered.copy_published(update.version):
            self._lacking = 0

    def lack_update(self, weights: object) -> bool:
        """Whether an update of ``weights`` would be read from buffers that lack the newest version."""
        return bool(self._lacking) and weights is None and self._source.weights is self._source.registered_weights

    def error(self) -> WeightSyncError:
        """Return the error of such an update: a worker has not installed the version, and may still use the buffers."""
        return WeightSyncError(
            f"the registered weights lack version {self._lacking}, because not every worker has installed it: give "
            "send() the weights"
        )
