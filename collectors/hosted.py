"""Hosted models: modules in Ray actors that all environments call. No worker has a copy of such a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import wsync


@runtime_checkable
class HostedModelUser(Protocol):
    """An object in an environment that calls a model in actors: a ``RayModuleTransform``."""

    @property
    def actors(self) -> Sequence[Any]:
        """Handles of the actors that have the model."""
        ...


def connect_hosted(schemes: Mapping[str, wsync.WeightSyncScheme], find: Callable[[str], Iterable[Any]]) -> None:
    """Initialise and connect the schemes of hosted models.

    Args:
        schemes: ``{"env.transform[0].module": scheme}``: ``env.transform[0]`` is the path of a ``HostedModelUser`` in
            the environments, ``module`` that of the model in its actors. Only schemes with ``sender_driven`` are used.
        find: returns the objects at a path in all environments.

    Raises:
        ValueError: a model id has no part before its last dot.
        LookupError, TypeError: there is no ``HostedModelUser`` there.
        Exception: as ``init_on_sender`` and ``connect``.
    """
    for model_id, scheme in schemes.items():
        if not scheme.sender_driven:
            continue
        path, _, name = model_id.rpartition(".")
        if not path:
            raise ValueError(f"'{model_id}' names no transform: a {type(scheme).__name__} is for a path like "
                             '"env.transform[0].module"')  # fmt: skip
        scheme.init_on_sender(name, context=SimpleNamespace(actors=_actors_of(find(path), path)))
        scheme.connect()


def _actors_of(users: Iterable[Any], path: str) -> list[Any]:
    """Return the actors that have one hosted model, each once; ``users`` are the objects at ``path``."""
    actors: list[Any] = []
    for user in users:
        if not isinstance(user, HostedModelUser):
            raise TypeError(
                f"'{path}' is a {type(user).__name__}, with its model in the same process: this scheme is "
                "for a RayModuleTransform; SharedMemWeightSyncScheme and the like are for models in workers"
            )
        actors.extend(actor for actor in user.actors if actor not in actors)
    return actors
