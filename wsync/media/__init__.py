"""Media: how the bytes of one connection's updates travel. One medium is one file, and has both ends in it.

``wsync.control.session`` has their protocol. ``offer.medium`` says how an update travels: false, its bytes follow the
``Offer`` on the connection itself, and the session reads them before the next message; true, the medium carries them,
beside the session, which goes on reading the connection and tells the medium what concerns it.
"""
