"""The backend ``wsync`` in each rank of a vLLM engine, called by vLLM's own phases in the thread that runs the model.

    init     the names and shapes are tried on weights without memory ─→ the rank connects to the trainer
    start    layers wait for their weights, without memory; vLLM has the old ones
    update   the whole version arrives and is verified ─→ in all ranks?
    update   each layer is copied over the old one
    finish   the rest of what vLLM does after loading; if nothing was loaded, the old weights are back

A version that does not arrive leaves the old weights. One that fails while it is loaded leaves layers without memory,
with which no forward succeeds, until another version is loaded: there are no mixed weights to serve.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _get_weight_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from wsync.control.auth import Address
from wsync.engine.vllm import MODEL, DataScheme
from wsync.errors import LayoutMismatch
from wsync.weights.layout import Layout
from wsync.weights.tensors import describe, digest_of, same_bits

_CONNECT_TIMEOUT = 10.0  # seconds in which the trainer has to be reached: nothing is generated meanwhile


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``address``: of the trainer, with its key (``Address.dump``). ``layout``: ``Layout.encode`` in base64.

    Or ``verify``: digests of the ``version`` that is loaded, and comes again within ``timeout`` seconds.
    """

    address: str = ""
    layout: str = ""
    verify: dict[str, int] | None = None
    version: int = 0
    timeout: float | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``version``: the one to fetch, or then to ``load``. ``timeout``: seconds that it may take; None for no limit."""

    version: int
    timeout: float | None = None
    load: bool = False


class WsyncWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the versions of one trainer, and loads them."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._names = {name for name, _ in self.model.named_parameters()}
        self._scheme: DataScheme | None = None
        self._active = False  # between start and finish
        self._fetched = 0  # the version that all ranks have, in this update
        self._loaded = False  # in this update
        self._unusable = False  # layers have no memory until a version is loaded

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.verify is not None:
            return self._verify(init_info.verify, init_info)
        parallel, scheme = self.parallel_config, DataScheme(timeout=_CONNECT_TIMEOUT)
        with self._together(scheme.shutdown):
            if self._active:  # vLLM would say so at start, in the first rank: see _raise
                raise RuntimeError("a weight update is already active")
            with set_current_vllm_config(self.vllm_config):
                self._require_fit(Layout.decode(base64.b64decode(init_info.layout)))
            scheme._address = Address.load(init_info.address)
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            scheme.init_on_receiver(MODEL, load=self._load, worker_idx=rank)
            scheme.connect()
        if scheme.model_id is not None:  # all ranks have accepted it: it takes the place of the trainer before
            self.shutdown()
            self._scheme = scheme

    def start_weight_update(self) -> None:
        if self._scheme is None:
            raise RuntimeError("wsync: POST /init_weight_transfer_engine comes first")
        self._fetched, self._loaded, self._active = 0, False, True
        self._empty_layers()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # vLLM's own method raises on a CPU
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        scheme, version = self._scheme, update_info.version
        with self._together(self._restore):
            if scheme is None or (update_info.load and self._fetched != version):
                raise RuntimeError(f"version {version} was not fetched before")
            found = (scheme.pull if update_info.load else scheme.fetch)(update_info.timeout)
            if found != version:
                raise RuntimeError(f"version {found} came, and {version} was announced")
            self._fetched, self._loaded = version, update_info.load

    def finish_weight_update(self) -> None:
        self._active = False
        if self._loaded:
            finalize_layerwise_reload(self.model, self.model_config)
            self._unusable = False
        else:  # it is aborted, or its trainer has died
            self._restore()

    def shutdown(self) -> None:
        if self._scheme is not None:
            self._scheme.shutdown()
        self._scheme = None

    def _load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load a version, which all ranks have."""
        self._unusable = True  # until all of it is loaded, in all ranks
        # vLLM keeps the tensors until a layer is complete, and these are valid during the call only.
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in pairs)

    @contextmanager
    def _together(self, undo: Callable[[], object] | None = None) -> Iterator[None]:
        """What one rank raises in the block, has ``undo`` called in all of them."""
        error = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001  the last rank raises it again
            error = raised
        if errors := self._agree(error):
            if undo is not None:
                undo()
            self._raise(errors, error)

    def _agree(self, error: Exception | None) -> str:
        """Return the errors of all ranks, when each has called this; empty if there is none."""
        said = "" if error is None else f"{type(error).__name__}: {error}"
        ranks = self.parallel_config.world_size_across_dp
        if ranks == 1:
            return said
        all_said = [""] * ranks
        torch.distributed.all_gather_object(all_said, said, group=get_world_group().cpu_group)
        return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(all_said) if said)

    def _raise(self, errors: str, error: Exception | None) -> None:
        """Raise the errors of all ranks in the last one: vLLM then has read the answers of the others.

        If another one raised, vLLM would take their answers for those to its next call.
        """
        if self.parallel_config.rank == self.parallel_config.world_size - 1:
            self._active = False  # for vLLM as well
            raise RuntimeError(f"wsync: {errors}") from error

    def _empty_layers(self) -> None:
        """Have all layers wait for weights, also those that have got some of a version that failed."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.load_numel = 0
            info.loaded_weights.clear()
        initialize_layerwise_reload(self.model)

    def _restore(self) -> None:
        """Give layers that wait their old weights back; if any may have new ones, leave none with weights."""
        self._fetched, self._loaded = 0, False
        if self._unusable:
            return self._empty_layers()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _require_fit(self, layout: Layout) -> None:
        """Have vLLM's loaders take weights of these names and shapes, into tensors without memory.

        LayoutMismatch: it has no such weights, has smaller ones, or needs others. The last two are not known of a
        quantized model.
        """
        calls, tried = Counter[str](), ""
        sent = defaultdict[Any, dict[str, int]](dict)  # by vLLM's tensor and its size: the sizes of its parts

        def trying(load: Callable[..., Any], given: list[Any], empty: Tensor, _: Any, prefix: str, key: str) -> Any:
            calls[f"{prefix}.{key}"] += 1
            (weight,), part = [one for one in given if isinstance(one, Tensor)], [str(one) for one in given[1:]]
            sent[f"{prefix}.{key}", empty.numel()][" ".join(part)] = weight.numel()
            return load(empty)

        def pairs() -> Iterable[tuple[str, Tensor]]:
            nonlocal tried
            for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
                tried = f"'{name}' of shape {tuple(shape)}"
                yield name, torch.zeros((), dtype=dtype).expand(tuple(shape))

        with self._loading_by(trying):
            try:
                loaded = self.model.load_weights(pairs())
            except Exception as error:  # a model's own loader raises anything; raised again, with the tensor's name
                said = f"{type(error).__name__}: {error}"
                raise LayoutMismatch(f"vLLM's model does not take {tried}: {said}") from error
        if self.model_config.quantization is not None or loaded is None:
            return
        ranks = self.parallel_config.tensor_parallel_size * self.parallel_config.data_parallel_size
        # vLLM takes its part of a tensor that is too large, without a word.
        if small := [name for (name, size), parts in sent.items() if sum(parts.values()) > size * ranks]:
            raise LayoutMismatch(f"vLLM's model has smaller weights than are sent: {describe(sorted(small))}")
        parts = getattr(self.model, "packed_modules_mapping", {})
        missing = self._names - {*loaded}
        for one in loaded:
            packed = parts.get(one.split(".")[-2] if "." in one else "", ())
            if 0 < calls[one] < len(packed):
                missing.add(f"{one} (of {', '.join(packed)})")
        if missing:
            raise LayoutMismatch(f"vLLM's model needs more weights than are sent: {describe(sorted(missing))}")

    def _verify(self, digests: dict[str, int], info: InitInfo) -> None:
        """Compare what is installed with the version that comes again; LayoutMismatch: names what differs."""
        scheme = self._scheme
        with self._together():
            if scheme is None or self._active or self._unusable:
                raise RuntimeError("no version is loaded")
            if (found := scheme.fetch(info.timeout)) != info.version:
                raise RuntimeError(f"version {found} came, and {info.version} was announced")
            weights = scheme.fetched()
            wrong = [name for name, one in digests.items() if name not in weights or digest_of(weights[name]) != one]
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                wrong = wrong or self._differing(weights)
            if wrong:
                raise LayoutMismatch(f"it has other values, or none, of {describe(wrong)}")

    def _differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Return names of weights that, if they were loaded, would change a copy of what is installed."""
        loading, wrong = "", dict[str, None]()

        def comparing(
            load: Callable[..., Any], _: Any, empty: Tensor, layer: torch.nn.Module, __: str, key: str
        ) -> Any:
            result = None
            for installed in _installed(layer, key, empty):
                copy: Any = installed.clone()
                copy.__class__ = empty.__class__  # as vLLM does it
                vars(copy).update(vars(empty))
                result = load(copy)
                if not same_bits(copy.data, installed):
                    wrong[loading] = None
            return result

        def pairs() -> Iterable[tuple[str, Tensor]]:
            nonlocal loading
            for loading, tensor in weights.items():
                yield loading, tensor.to(self.device)

        with self._loading_by(comparing):
            self.model.load_weights(pairs())
        return [*wrong]

    @contextmanager
    def _loading_by(self, act: Callable[..., Any]) -> Iterator[None]:
        """Have ``act(load, given, empty, layer, prefix, key)`` called in place of each loader.

        ``load(tensor)`` calls it. ``given``: the weights, and which part of the tensor they are. ``empty`` has the form
        of the layer's tensor, and no memory.
        """
        loaders = list[tuple[Any, Any]]()

        def acting(loader: Callable[..., Any], *about: Any) -> Callable[..., Any]:
            def act_for(_: Tensor, *args: Any, **options: Any) -> Any:
                return act(lambda tensor: loader(tensor, *args, **options), [*args, *options.values()], *about)

            return act_for

        self._empty_layers()
        try:
            for prefix, layer in self.model.named_modules():
                for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                    if tensor is not None:
                        loaders.append((tensor, _get_weight_loader(tensor)))
                        empty = tensor if tensor.is_meta else to_meta_tensor(tensor)
                        tensor.weight_loader = acting(_get_original_loader(tensor), empty, layer, prefix, key)
            yield
        finally:
            for tensor, loader in reversed(loaders):  # one tensor may be met twice
                tensor.weight_loader = loader
            self._restore()


def _installed(layer: Any, key: str, empty: Tensor) -> list[Tensor]:
    """Return what an emptied layer has by this name; on a CPU, also what a packed copy makes of the unit matrix.

    LayoutMismatch: it has none in the form of ``empty``.
    """
    parameters, buffers = get_layerwise_info(layer).kernel_tensors
    tensor = {**parameters, **buffers}[key].data
    found = [tensor] if tensor.shape == empty.shape else []
    if key == "weight" and hasattr(layer, "cpu_linear"):  # vLLM gives it to linear layers on a CPU alone
        unit = torch.eye(empty.shape[1], dtype=empty.dtype)
        found.append(layer.cpu_linear(unit, tensor, None).T.contiguous())
    if not found:
        raise LayoutMismatch(f"vLLM keeps '{key}' of a {type(layer).__name__} in another form: it cannot be compared")
    return found
