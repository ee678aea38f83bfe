"""Strike at a chosen one of the points where the interpreter looks for signals, or lets another thread run."""

import sys
from collections.abc import Callable


class Struck(BaseException):
    """What the handler raises."""


def _raise() -> None:
    raise Struck


def struck_at(point: int, function: Callable[[], object], strike: Callable[[], None] = _raise) -> bool:
    """Call ``function``, and at its ``point``-th point ``strike``, once; whether it ended before."""
    passed = 0

    def look(_frame: object, event: str, _: object) -> None:
        nonlocal passed
        if event in ("call", "c_return"):  # where a function of Python's begins, and where one of C's has ended
            passed += 1
            if passed == point:
                sys.setprofile(None)
                strike()

    sys.setprofile(look)
    try:
        function()
    except Struck:
        return False
    finally:
        sys.setprofile(None)
    return passed < point
