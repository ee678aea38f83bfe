"""Standard output and standard error: that they cannot be written is no reason to end a process."""

from __future__ import annotations

import io
import sys
from typing import Any


class _Lenient(io.FileIO):
    """A descriptor that writes nothing more after its first error, and says so once, on standard error."""

    _failed = False

    def write(self, data: Any, /) -> int:
        try:
            written = None if self._failed else super().write(data)
        except OSError as error:
            self._failed, written = True, None
            if self.fileno() != sys.__stderr__.fileno():  # pyright: ignore[reportOptionalMemberAccess]
                print(f"standard output cannot be written, and the process goes on: {error}", file=sys.stderr)
        return memoryview(data).nbytes if written is None else written  # None: a pipe that does not wait is full


def keep_output_harmless() -> None:
    """Write what an encoding lacks as a replacement character, and go on after an error; not in a replaced stream."""
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        raw, how = _Lenient(stream.fileno(), "w", closefd=False), "backslashreplace" if name == "stderr" else "replace"
        by_line = stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, how, line_buffering=by_line))
