"""What workers are given, as bytes: nothing is shared with them."""

from __future__ import annotations

from typing import Any

import cloudpickle


def copy_of(policy: Any) -> Any:
    """A copy of the policy that shares nothing with it.

    Raises:
        TypeError: it cannot be pickled; says why.
    """
    return None if policy is None else cloudpickle.loads(pickled(policy, "policy"))


def pickled(thing: Any, name: str) -> bytes:
    """``thing`` as bytes, with lambdas and local functions.

    Raises:
        TypeError: it cannot be pickled; says what and why.
    """
    try:
        return cloudpickle.dumps(thing)
    except Exception as error:
        raise TypeError(
            f"the {name} cannot be sent to a worker, because it cannot be pickled ({error}); "
            "give a factory (create_env_fn, policy_factory) that makes it there"
        ) from error
