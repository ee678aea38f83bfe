"""A transform with its module in a Ray actor, shared by all environments that have a pickle of the transform."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import nn

from wsync import NotConnected, SyncTimeout, WorkerDied, WorkerFailed, missing_extra

try:
    import ray
    from ray.actor import ActorHandle
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
except ModuleNotFoundError as error:
    raise missing_extra(error, "ray") from error

from collectors.distributed.ray_cluster import Cluster, connection
from collectors.environments.specs import Array
from collectors.environments.transforms import Key, Transform, call

_NAMESPACE = "wsync"


class ModuleHost:
    """The actor: a module, which ``wsync.RayModuleTransformScheme`` finds as ``"module"``, and calls of it."""

    def __init__(self, make_module: Callable[[], nn.Module]) -> None:
        self.module = make_module()

    def ready(self) -> None:
        """Return once the module has been made."""

    def evaluate(self, *inputs: Array) -> Array:
        """Call the module, without gradients."""
        return call(self.module, inputs)


class RayModuleTransform(Transform):
    """A transform with a module in a Ray actor as its function, shared by all environments that have a pickle of it.

    A pickle has only the actor's address: a process that is not connected to a Ray cluster, such as a worker of a
    ``MultiSyncCollector``, connects to the actor's cluster when it first needs the module. The process that has made
    the transform updates the module, and ends the actor::

        scheme = wsync.RayModuleTransformScheme()
        scheme.init_on_sender("module", context=transform, model=trained)
        scheme.connect()
        scheme.send()

    Args:
        make_module: called in the actor; its module maps the tensors of ``in_keys`` to one tensor.
        in_keys: see ``Transform``.
        out_keys: see ``Transform``.
        timeout: seconds for the actor to start, and to answer a call; None for no limit.
        actor_options: Ray's options of an actor (``num_cpus``, 0 by default, ``num_gpus``, ``resources``).

    Raises:
        ValueError: keys are unknown.
        wsync.NotConnected: Ray is not initialised, the cluster cannot be reached, or this was shut down.
        wsync.WorkerDied: the actor could not start, or is dead; carries its error.
        wsync.SyncTimeout: it did not start, or answer, in time.
        wsync.WorkerFailed: the module raised; carries the traceback.
    """

    def __init__(
        self,
        make_module: Callable[[], nn.Module],
        in_keys: Sequence[Key],
        out_keys: Sequence[Key],
        *,
        timeout: float | None = 60.0,
        **actor_options: Any,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if not ray.is_initialized():
            raise NotConnected("Ray is not initialised: call ray.init(), or ray.init(address=…), before this")
        self.timeout = timeout
        self._address: str = ray.get_runtime_context().gcs_address
        self._name = f"module-transform-{uuid.uuid4().hex}"
        self._closed = False
        options = {"num_cpus": 0, **actor_options, "name": self._name, "namespace": _NAMESPACE}
        actor: Any = ray.remote(ModuleHost).options(**options).remote(make_module)
        self._actor: ActorHandle | None = actor
        self._connection = connection()  # the one in which the handle is valid
        try:
            self._answer(actor.ready.remote(), "start")
        except BaseException:  # also Ctrl-C: the actor would outlive the call
            ray.kill(actor)
            raise

    @property
    def actors(self) -> list[ActorHandle]:
        """The actor, in a list as a scheme takes it."""
        return [self._connected()]

    def evaluate(self, *inputs: Array) -> Array:
        """Call the module in the actor."""
        return self._answer(self._connected().evaluate.remote(*inputs), "call the module")

    def shutdown(self) -> None:
        """End the actor for all environments. Idempotent; does nothing after ``ray.shutdown``, which has ended it.

        Raises:
            wsync.SyncTimeout: it has not ended within ``timeout`` seconds.
        """
        actor, self._actor, self._closed = self._actor, None, True
        if actor is None or self._connection != connection():
            return
        ray.kill(actor)
        try:
            ray.get(actor.ready.remote(), timeout=self.timeout)  # raises once it has ended
        except RayActorError:
            return
        except GetTimeoutError as error:
            raise SyncTimeout(f"{self} was told to end, and has not within {self.timeout} s") from error

    def _answer(self, ref: ray.ObjectRef, what: str) -> Any:
        try:
            return ray.get(ref, timeout=self.timeout)
        except GetTimeoutError as error:
            raise SyncTimeout(f"{self} did not {what} within {self.timeout} s: it is stuck, or busy") from error
        except RayActorError as error:
            raise WorkerDied(f"{self} is dead, and could not {what}: {error}") from error
        except RayTaskError as error:
            raise WorkerFailed(f"{self} could not {what}: {error}") from error

    def _connected(self) -> ActorHandle:
        if self._closed:
            raise NotConnected(f"{self} was shut down")
        if self._actor is None or self._connection != connection():
            try:
                Cluster(self._address)  # connected until this process ends, or calls ray.shutdown()
                self._actor = ray.get_actor(self._name, namespace=_NAMESPACE)
            except ConnectionError as error:
                raise NotConnected(f"{self} cannot be reached: {error}") from error
            except ValueError as error:
                raise WorkerDied(f"{self} is dead: the Ray cluster at {self._address} has no such actor") from error
            self._connection = connection()
        return self._actor

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the handle, which is valid in one connection only."""
        return {**self.__dict__, "_actor": None, "_connection": None}

    def __str__(self) -> str:
        return f"RayModuleTransform (actor {self._name})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
