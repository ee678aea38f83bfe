"""Connections between processes: the control thread, who is at the other end, and what travels.

Public, for collectors and for backends that bring processes together in their own way: ``Address``, ``Channel``,
``ChannelListener``, ``connect_channel``, ``shared_key``, ``listen_on``.
"""

from wsync.control.auth import Address, shared_key
from wsync.control.channel import Channel, ChannelListener, connect_channel
from wsync.control.listen import listen_on
from wsync.deadlines import readable

__all__ = ["Address", "Channel", "ChannelListener", "connect_channel", "listen_on", "readable", "shared_key"]
