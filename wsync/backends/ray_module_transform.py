"""Ray: weights of a module inside an environment's transform, which is in an actor."""

from __future__ import annotations

from typing import Any, ClassVar

from wsync.backends.ray import RayWeightSyncScheme


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Weight synchronization to a module inside a ``RayModuleTransform``, an environment transform in a Ray actor.

    The sender drives both ends: it is initialised with the transform (``context=transform``) or its actors, and
    ``connect()`` is called on the sender alone. A collector that is given the scheme does both, for the transform at
    the path: ``weight_sync_schemes={"env.transform[0].module": scheme}``.
    """

    name = "ray_module_transform"
    collectors: ClassVar[tuple[str, ...]] = ()  # for a module in an environment, not for a policy
    sender_driven = True

    def init_on_sender(self, model_id: str = "module", context: Any = None, **given: Any) -> None:
        """Set up the trainer's end, as ``RayWeightSyncScheme.init_on_sender`` does.

        Raises:
            ValueError: neither the transform nor its actors were given.
        """
        if given.get("actors") is None and not hasattr(context, "actors"):  # the class is the user's
            raise ValueError("RayModuleTransformScheme needs context=<the RayModuleTransform>, or actors=[…]")
        super().init_on_sender(model_id, context, **given)
