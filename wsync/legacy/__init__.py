"""The older API: senders and receivers of their own, and pipes instead of a pickled scheme. A thin layer on schemes.

trainer   init_on_sender(pipes=[…]) ─→ get_sender() ─→ send ─→ (the first one: connect) ─→ scheme.send
worker    init_on_worker(pipe=…) ─→ (a thread: connect) ─→ get_receiver().receive ─→ scheme.receive
"""

from wsync.legacy.api import WeightReceiver, WeightSender
from wsync.legacy.pipes import PipeTransport

__all__ = ["PipeTransport", "WeightReceiver", "WeightSender"]
