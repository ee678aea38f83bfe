"""The weights that a sender reads for each update, and which worker gets which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.errors import LayoutMismatch, NotConnected
from wsync.sending.membership import as_plain_integer
from wsync.sending.reader import Reader
from wsync.sending.tensor_finders import TensorFinder, TransformedFinder
from wsync.shm.registered import RegisteredWeights
from wsync.transforms.chain import Chain
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot, describe, no_weights, snapshot
from wsync.weights.strategy import WeightStrategy

DeviceMap = Callable[[int, Any], Any]
"""``(worker_idx, weights) -> weights`` for that worker."""


class Part(NamedTuple):
    """The same weights for some workers, checked against the layout."""

    workers: Sequence[int]
    tensors: list[Tensor]
    extra: Mapping[str, Any] | None


def per_worker(weights: object) -> dict[int, Any] | None:
    """Return each worker's weights, if ``weights`` are ``{worker_idx: weights}``; otherwise None.

    Indices may be integers of any type, as ``worker_ids`` may; they are returned as plain ones.

    Raises:
        ValueError: a worker has weights twice: equal tensors are different keys.
    """
    if isinstance(weights, nn.Module | TensorDictBase) or not isinstance(weights, Mapping):
        return None
    found: dict[int, Any] = {}
    for key, own in weights.items():
        worker = as_plain_integer(key)
        if type(worker) is not int:
            return None
        if worker in found:
            raise ValueError(f"worker {worker} has weights twice")
        found[worker] = own
    return found or None


def extracted(weights: Any, strategy: WeightStrategy) -> Any:
    """Return ``weights`` in the format of ``strategy``; ``{worker: …}`` where workers differ."""
    by_worker = per_worker(weights)
    if by_worker is None:
        return strategy.extract_weights(weights)
    return {worker: strategy.extract_weights(own) for worker, own in by_worker.items()}


class Source:
    """A model, live weights, or weights per worker; read again for every update.

    Used by the thread that calls the scheme.

    Args:
        weights: module, TensorDict, state dict or ``{worker: any of these}``; None if every send is given its own.
        strategy: the format that ``device_map_fn`` is given; also writes the registered weights.
        device_map_fn: ``(worker_idx, weights) -> weights``, applied for each worker.
        own_buffers: whether every worker gets a part (and so a buffer) of its own, even if all parts are equal.
        registered_weights: as the user has given them. Weights that all workers are sent are also written into them, as
            they are before the transform.
        transform: applied to the weights before they are packed.
        one_for_all: why all workers get the same weights: the error where a map is given, or weights per worker.
        undefined: why no weights define the layout: the error of ``first``.

    Attributes:
        shared_buffers: the registered weights, if they are in shared memory; the sender then writes them.

    Raises:
        TypeError: the weights, or the map, are of a wrong type.
        ValueError: weights per worker together with a map that would make them; or ``one_for_all``.
    """

    def __init__(
        self,
        weights: object = None,
        strategy: WeightStrategy | None = None,
        *,
        device_map_fn: DeviceMap | None = None,
        own_buffers: bool = False,
        registered_weights: TensorDictBase | None = None,
        transform: Chain | None = None,
        one_for_all: str = "",
        undefined: str = "",
    ) -> None:
        if one_for_all and device_map_fn is not None:
            raise ValueError(f"{one_for_all}: device_map_fn cannot be used")
        if weights is not None and not isinstance(weights, nn.Module | TensorDictBase | Mapping):
            raise no_weights(weights)
        if device_map_fn is not None and not callable(device_map_fn):
            raise TypeError(f"device_map_fn is a function of a worker's index and weights, not {device_map_fn!r}")
        if device_map_fn is not None and per_worker(weights) is not None:
            raise ValueError("these are each worker's own weights already: leave device_map_fn out")
        self._one_for_all = one_for_all
        self._undefined = undefined
        if one_for_all:
            self._require_same(per_worker(weights) or {})
        self.weights = registered_weights if weights is None else weights
        self.registered_weights = registered_weights
        self.shared_buffers: RegisteredWeights | None = None
        self._strategy = strategy or WeightStrategy()
        self._device_map_fn = device_map_fn
        self._own_buffers = own_buffers
        self._transform = transform
        self._partial_transform = None if transform is None else transform.for_parts()
        self._reader = Reader()
        self._optional = frozenset[str]()  # the non-persistent buffers of the first weights
        self._fallback_reader = Reader()  # reads ``weights``, for those that an update lacks
        self._same_for_all = device_map_fn is None and registered_weights is None and not own_buffers

    def _require_same(self, by_worker: Mapping[int, Any]) -> None:
        if self._one_for_all and len(by_worker) > 1:
            raise ValueError(f"{self._one_for_all}: weights per worker cannot be used")

    @property
    def changes_weights(self) -> bool:
        """Whether other weights are sent than those given: made by a ``device_map_fn`` or a ``send_transform``."""
        return self._device_map_fn is not None or self._transform is not None

    def first(self, weights: object) -> Snapshot:
        """Return one worker's weights, which define the layout.

        Raises:
            NotConnected: there are none yet; or ``undefined``.
        """
        if self._undefined:
            raise NotConnected(self._undefined)
        given = self._given(weights)
        by_worker = per_worker(given)
        one = self._reader.read(given if by_worker is None else next(iter(by_worker.values())))
        self._optional = frozenset(one.optional & one.tensors.keys())
        return self._transformed(one)

    def _with_first_buffers(self, weights: Snapshot) -> Snapshot:
        """Return ``weights`` with the non-persistent buffers that the first weights had: a state dict has none."""
        fallback = None
        if not self._optional <= weights.tensors.keys() and self.weights is not None:
            fallback = None if per_worker(self.weights) is not None else self._fallback_reader.read(self.weights)
        return weights.with_optional(self._optional, fallback)

    def _transformed(self, weights: Snapshot) -> Snapshot:
        """Return ``weights`` as they are sent; valid until the next call."""
        transform = self._transform
        if transform is None:
            return weights
        extra = None if transform.selects else weights.extra
        return Snapshot(transform(weights.tensors), extra, weights.optional, transform.selects)

    def _given(self, weights: object) -> object:
        """Return ``weights``, or the source's own."""
        given = self.weights if weights is None else weights
        if given is None:
            raise NotConnected("nothing to send: no model or weights were given, neither at init nor now")
        return given

    def finder(self, weights: object, layout: Layout) -> TensorFinder | None:
        """Return a finder for updates like this one; None if workers get different weights, or there is none."""
        given = self.weights if weights is None else weights
        if not self._same_for_all:
            return None
        if self._transform is None:
            return self._reader.finder(given, layout)
        if not isinstance(given, nn.Module) or isinstance(given, TensorDictBase):
            return None
        if any(one.device.type != "cpu" for one in given.parameters()):
            return None  # the fast path packs tensors in main memory: the transform would run again for the full send
        return TransformedFinder(given, self._transformed_module, layout.names)

    def _transformed_module(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        """Return the weights of a module as they are sent; None if it has changed since the last update."""
        known = self._reader.read_unchanged(module)
        return None if known is None else self._transformed(known).tensors

    def parts(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        layout: Layout,
        rest: Sequence[Tensor] | None = None,
    ) -> Iterable[Part]:
        """Return the weights of each worker, checked. A part is valid until the next one is made.

        Args:
            weights: the update; None reads the source's own.
            workers: the workers that must get weights.
            absent: absent workers, which get the same as the others, and need not be named in weights per worker.
            layout: the layout of the weights.
            rest: in the layout's order; completes ``weights``, where those are a part of the model.

        Raises:
            LayoutMismatch: some weights do not fit.
            NotConnected: there are none.
            ValueError: weights per worker lack one of ``workers``, or name another; or ``one_for_all``.
        """
        given = self._given(weights)
        by_worker = per_worker(given)
        if by_worker is not None:
            self._require_same(by_worker)
            if weights is None:
                by_worker = {worker: own for worker, own in by_worker.items() if worker in workers or worker in absent}
            wrong = sorted((by_worker.keys() ^ set(workers)) - set(absent))
            if wrong:
                raise ValueError(f"weights per worker must be for workers {list(workers)}; worker(s) {wrong} differ")
            return (self._part([worker], own, layout) for worker, own in by_worker.items())
        everyone = [*workers, *absent] if absent else workers
        if rest is not None:
            return [self._completed(everyone, given, layout, rest)]
        if self._device_map_fn is None:
            part = self._part(everyone, given, layout)
            return [Part([worker], part.tensors, part.extra) for worker in everyone] if self._own_buffers else [part]
        expressed = self._strategy.express(self._reader.read(given))
        return self._mapped_parts(everyone, expressed, layout, self._device_map_fn)

    def registered_writer(self, weights: object) -> Callable[[], None] | None:
        """Return a function that writes an update to all workers into the user's own buffers, to be called once sent.

        None if they do not change with this update, or lie in shared memory: ``RegisteredWeights`` writes those.

        Raises:
            LayoutMismatch: the weights do not fit the buffers.
        """
        given, registered = self._given(weights), self.registered_weights
        if registered is None or given is registered or self.shared_buffers is not None:
            return None
        if self._device_map_fn is not None or per_worker(given) is not None:
            return None
        self._strategy.check(registered, given)
        return partial(self._strategy.apply_weights, registered, given)

    def _mapped_parts(
        self, workers: Sequence[int], weights: object, layout: Layout, device_map_fn: DeviceMap
    ) -> Iterator[Part]:
        """Yield the weights that are made for each worker; no earlier ones are kept here."""
        for worker in workers:
            yield self._ordered([worker], snapshot(device_map_fn(worker, weights)), layout)

    def _completed(self, workers: Sequence[int], given: object, layout: Layout, rest: Sequence[Tensor]) -> Part:
        """Return a part of a model, completed by ``rest``."""
        if not self._same_for_all:
            raise ValueError("a partial update needs a scheme without registered weights or weights per worker")
        some = snapshot(given).tensors
        if self._partial_transform is not None:
            some = self._partial_transform(some)
        leader_of = dict(layout.ties)
        entries = {name: leader_of.get(index, index) for index, name in enumerate(layout.names)}
        unknown = [name for name in some if name not in entries]
        if unknown:
            raise LayoutMismatch(f"a partial update has weights that are not the model's: unknown {describe(unknown)}")
        if not some:
            raise LayoutMismatch("a partial update has no weights")
        by_leader = {entries[name]: tensor for name, tensor in some.items()}  # one name of a tied tensor is enough
        tensors = [
            some.get(name, by_leader.get(leader, old))
            for (name, leader), old in zip(entries.items(), rest, strict=True)
        ]
        layout.check(tensors)
        return Part(workers, tensors, None)

    def _part(self, workers: Sequence[int], given: object, layout: Layout) -> Part:
        known = self._reader.read_module(given, layout) if self._transform is None else None
        return self._ordered(workers, self._reader.read(given), layout) if known is None else Part(workers, *known)

    def _ordered(self, workers: Sequence[int], weights: Snapshot, layout: Layout) -> Part:
        weights = self._transformed(self._with_first_buffers(weights))
        return Part(workers, layout.order(weights), weights.extra)
