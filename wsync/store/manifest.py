"""The manifest of a store: JSON that names the newest version.

Any process that can write to the store may have made it. So every field is checked before it is used: the names of a
version's files follow from its number and its writer, and are in the store's folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from reprlib import repr as shortened

from wsync.control.settings import layout_in
from wsync.types import LAST_VERSION
from wsync.weights.layout import Layout

MANIFEST_BYTES = 64 << 20
"""The largest manifest that is read: it has the layout."""
_WRITER = re.compile(r"[0-9A-Za-z]{1,64}")


@dataclass(frozen=True)
class Manifest:
    """The newest version of a store, and how it is read.

    Attributes:
        version: the newest.
        writer: a token of the trainer that wrote it.
        layout: names, shapes, dtypes, ties, as JSON (``SenderSettings``).
        checksum: the checksum of the packed weights.
        base: the older version that the .delta file is relative to; 0: there is no such file.
    """

    version: int
    writer: str
    layout: str
    checksum: int
    base: int = 0

    @property
    def name(self) -> str:
        """The name of the version's files, without ``.safetensors`` or ``.delta``; no other version has it."""
        return f"v{self.version:08d}-{self.writer}"

    @property
    def file(self) -> str:
        """The name of the file with all weights."""
        return f"{self.name}.safetensors"

    @property
    def delta(self) -> str:
        """The name of the file with the difference to ``base``."""
        return f"{self.name}.delta"

    def dump(self) -> bytes:
        """Return the manifest as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def load(cls, content: bytes) -> Manifest:
        """Return the manifest that ``dump`` returned as ``content``; the layout is not parsed yet.

        Raises:
            ValueError: it is malformed; names the field.
        """
        if len(content) > MANIFEST_BYTES:
            raise ValueError(f"it has more than {MANIFEST_BYTES} bytes")
        try:
            found = json.loads(content)
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        unknown = found.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown field {shortened(min(unknown))}")
        for field in fields(cls):
            if field.name not in found and field.default is MISSING:
                raise ValueError(f"field '{field.name}' is missing")
            if field.name in found and type(found[field.name]).__name__ != field.type:  # a bool is no int
                raise ValueError(f"field '{field.name}' is {shortened(found[field.name])}, not of type {field.type}")
        manifest = cls(**found)
        manifest._check()
        return manifest

    def _check(self) -> None:
        _require_range("version", self.version, 1, LAST_VERSION - 1)
        _require_range("checksum", self.checksum, 0, (1 << 64) - 1)
        if not _WRITER.fullmatch(self.writer):
            raise ValueError(f"field 'writer' is {shortened(self.writer)}, not 1 to 64 letters and digits")
        _require_range("base", self.base, 0, self.version - 1)

    def parse_layout(self) -> Layout:
        """Return the layout of the weights.

        Raises:
            ValueError: it is malformed, or has extra state; names the field.
        """
        try:
            layout = layout_in(self.layout.encode())
        except ValueError as error:
            raise ValueError(f"field 'layout': {error}") from error
        if layout.extra:
            raise ValueError("field 'layout': it has extra state, which a store cannot have")
        return layout


def _require_range(field: str, value: int, least: int, largest: int) -> None:
    if not least <= value <= largest:
        raise ValueError(f"field '{field}' is {shortened(value)}, not from {least} to {largest}")
