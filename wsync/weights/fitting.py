"""Whether weights of a layout fit what is to take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.layout import Layout
from wsync.weights.overlaps import require_apart
from wsync.weights.snapshot import describe


def checked_tensors(
    own: Mapping[str, Tensor],
    layout: Layout,
    receiver: str,
    *,
    optional: Collection[str] = (),
    problems: Sequence[str] = (),
) -> list[Tensor]:
    """Return the tensors of a receiver, in the layout's order, checked against it.

    Args:
        own: the tensors of the receiver, by name.
        layout: the layout of the weights that are sent.
        receiver: the receiver, for the error.
        optional: names of tensors that keep their values if they are not sent.
        problems: what else does not fit.

    Raises:
        LayoutMismatch: there are ``problems``; names, shapes or dtypes differ; a tensor is sharded, sparse, quantised
            or without memory; or two of them overlap partly in one memory.
    """
    names = set(layout.names)
    unwanted = [name for name in layout.names if name not in own]
    found = [f"it has no '{name}'" for name in unwanted]
    if not layout.model_may_have_more:
        surplus = [name for name in own if name not in names and name not in optional]
        found += [f"the weights that are sent have no '{name}'" for name in surplus]
    found += problems
    if found:
        some = ", ".join(map(repr, unwanted[:2])) + (", …" if len(unwanted) > 2 else "")
        remedy = f" (send_transform=wsync.transforms.Exclude({some}) leaves weights out)" if unwanted else ""
        raise LayoutMismatch(f"the weights do not fit {receiver}: {describe(found)}{remedy}")
    tensors = [own[name] for name in layout.names]
    layout.check(tensors, receiver)
    require_apart(dict(zip(layout.names, tensors, strict=True)), receiver)
    return tensors
