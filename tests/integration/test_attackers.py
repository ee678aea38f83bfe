"""``tests/attacks.py``, in a network of its own: the attacker connects to every port that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_python

ATTACKS = Path(__file__).parents[1] / "attacks.py"
NO_NETWORK = 77
IN_OWN_NETWORK = f"""
import ctypes, fcntl, os, socket, struct, sys
if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
    sys.exit({NO_NETWORK})
with socket.socket() as sock:  # SIOCSIFFLAGS: IFF_UP
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 1))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow  # a minute
@pytest.mark.timeout(400)
def test_another_users_process_gets_no_weights() -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(ATTACKS)]
    done = run_python("-c", IN_OWN_NETWORK, *command, folder=ATTACKS.parents[1], timeout=390)
    if done.returncode == NO_NETWORK:
        pytest.skip("this user may not make a network of its own")
    assert done.returncode == 0, done.stdout + done.stderr
