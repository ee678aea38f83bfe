"""The contract suite of wsync's backends.

Each promise that a backend makes is a test. The author of a backend subclasses ``BackendContract`` in a test file::

    from wsync.testing import BackendContract

    class TestMyBackend(BackendContract):
        def make_scheme(self, **options):
            return MyScheme(**options)

and has pytest run it. Workers are real processes, which receive the pickled scheme: the class of the scheme has to be
importable there. ``BackendHooks`` lists what else can be overridden.
"""

from __future__ import annotations

from wsync.testing.delivery import Delivery
from wsync.testing.faults import Faults
from wsync.testing.pull import Pull
from wsync.testing.restarts import Restarts
from wsync.testing.shutdowns import Shutdowns
from wsync.testing.transactions import Transactions
from wsync.testing.transports import Transports
from wsync.testing.unlike import UnlikeEnds
from wsync.testing.updates import Updates


# pytest runs the tests of the last base class first.
class BackendContract(Shutdowns, Pull, UnlikeEnds, Transactions, Restarts, Faults, Transports, Updates, Delivery):
    """The promises of every backend, as tests. See ``BackendHooks`` for what a backend overrides."""
