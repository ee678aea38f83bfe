"""Raise at a chosen one of the points where the interpreter looks for signals, as a handler would that raises."""

import sys
from collections.abc import Callable


class Struck(BaseException):
    """What the handler raises."""


def struck_at(point: int, function: Callable[[], object]) -> bool:
    """Call ``function``, struck at its ``point``-th point; whether it ended before."""
    passed = 0

    def look(_frame: object, event: str, _: object) -> None:
        nonlocal passed
        if event in ("call", "c_return"):  # where a function of Python's begins, and where one of C's has ended
            passed += 1
            if passed == point:
                raise Struck  # which ends the profiling as well

    sys.setprofile(look)
    try:
        function()
    except Struck:
        return False
    finally:
        sys.setprofile(None)
    return passed < point
