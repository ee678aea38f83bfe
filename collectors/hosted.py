"""Hosted models: modules in Ray actors that all environments call. No worker has a copy of such a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import wsync


@runtime_checkable
class ModelHost(Protocol):
    """An object in an environment that calls a model in actors: a ``RayModuleTransform``."""

    @property
    def actors(self) -> Sequence[Any]:
        """Handles of the actors that have the model."""
        ...


class HostedModelContext:
    """The actors that have one hosted model, each once: the context of a scheme that has no receiver of its own.

    Args:
        hosts: the objects at one path in all environments.
        path: for errors.

    Raises:
        TypeError: one is no ``ModelHost``.
    """

    def __init__(self, hosts: Iterable[Any], path: str) -> None:
        self.actors: list[Any] = []
        for host in hosts:
            if not isinstance(host, ModelHost):
                raise TypeError(
                    f"'{path}' is a {type(host).__name__}, with its model in the same process: this scheme is "
                    "for a RayModuleTransform; SharedMemWeightSyncScheme and the like are for models in workers"
                )
            self.actors.extend(actor for actor in host.actors if actor not in self.actors)


def connect_hosted(schemes: Mapping[str, wsync.WeightSyncScheme], find: Callable[[str], Iterable[Any]]) -> None:
    """Initialise and connect the schemes of hosted models.

    Args:
        schemes: ``{"env.transform[0].module": scheme}``: the path of a ``ModelHost``, and of the model in its actors.
        find: returns the objects at a path in all environments.

    Raises:
        ValueError: a model id has no part before its last dot.
        LookupError, TypeError: there is no ``ModelHost`` there.
        Exception: as ``init_on_sender`` and ``connect``.
    """
    for model_id, scheme in schemes.items():
        path, _, name = model_id.rpartition(".")
        if not path:
            raise ValueError(f"'{model_id}' names no transform: a {type(scheme).__name__} is for a path like "
                             '"env.transform[0].module"')  # fmt: skip
        scheme.init_on_sender(name, context=HostedModelContext(find(path), path))
        scheme.connect()
