"""Transforms: what is done to weights between a trainer and workers with models that differ from the trainer's.

A transform is a function ``Mapping[str, Tensor] → Mapping[str, Tensor]`` of weights by their dotted names. A scheme
applies ``send_transform`` in the trainer, before the weights are packed, so that the result is what travels; and
``receive_transform`` in the worker, before the weights are installed. A list of transforms is applied in order.

    fuse = Fuse({"*.qkv.weight": ["*.q.weight", "*.k.weight", "*.v.weight"]})
    scheme = SharedMemWeightSyncScheme(send_transform=[fuse, Cast("bfloat16")])

The transforms here keep nothing of the weights. A function of one's own may read what changes from version to version.
It may be called any number of times for one version, must not write into the tensors that it is given, and must be
picklable if it is a ``receive_transform``, which is also called with zeros, at ``connect``.

*Patterns* are those of ``fnmatch``. A pattern without a dot also matches one component of a name: ``lora_*`` matches
``layers.0.lora_A.weight``. A pattern that matches no weight of the model is an error at ``connect``, which lists
names that there are. A partial update (``send(…, partial=True)``) may lack names, and weights for patterns and groups.
"""

from wsync.transforms.chain import (
    Cast,
    Chain,
    Dequantize,
    Exclude,
    Fuse,
    Quantize,
    QuantizeInt8,
    Rename,
    Select,
    Transform,
    compose,
)
from wsync.transforms.delta import Delta

__all__ = [
    "Cast",
    "Chain",
    "Delta",
    "Dequantize",
    "Exclude",
    "Fuse",
    "Quantize",
    "QuantizeInt8",
    "Rename",
    "Select",
    "Transform",
    "compose",
]
