"""Schemes across a network: torchrun, a store of the user's, other addresses, another host."""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_python

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from check_cuts import CABLE, HERE, INSIDE, NAME, run
from listening import LOOPBACK, listening
from torch import nn

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.models import Small, fill

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_torchrun() -> None:
    """Connect by torchrun's store and by that of an initialised default group."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    done = run_python(*torchrun, Path(__file__).parent / "torchrun_sync.py", folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for where in ("in the agent's store", "in the default group's"):
        assert done.stdout.count(where) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "localhost", "::1"])
def test_other_addresses(pool: WorkerPool, host: str) -> None:
    try:
        wsync.listen_on(host).close()
    except wsync.NotConnected as error:
        pytest.skip(f"this machine has no {host}: {error}")
    scheme = wsync.DistributedWeightSyncScheme(host=host, timeout=30.0, shared_memory=False, inline_bytes=0)
    with pool.group(1) as workers, scheme:
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        assert workers[0].result() == 1
        for value in range(2, 5):
            scheme.send(fill(model, value))
            assert workers[0].call(commands.output)[0] == value


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.77", r"host=192\.0\.2\.77"),
        ("", "host is empty"),
        ("0.0.0.0", r"host=0\.0\.0\.0 is every interface"),
        ("0", "host=0 is every interface"),
        ("::", "host=:: is every interface"),
    ],
)
def test_an_address_that_this_machine_does_not_have(host: str, said: str) -> None:
    scheme = wsync.DistributedWeightSyncScheme(host=host)
    with pytest.raises(wsync.NotConnected, match=said):
        scheme.init_on_sender("policy", model=nn.Linear(1, 1))


def test_loopback_is_the_default() -> None:
    before = listening()
    scheme = wsync.DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", model=nn.Linear(1, 1))
    with scheme:
        assert listening() - before <= {LOOPBACK}
        assert LOOPBACK in listening()


@pytest.fixture
def namespace() -> Iterator[str]:
    """The beginning of a command on another host, as far as the network goes: in a network namespace, with a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    try:
        run(*CABLE)
        yield INSIDE
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a network namespace cannot be made here: {error}")
    finally:
        subprocess.run(["ip", "netns", "delete", NAME], check=False)


REMOTE = """
import pickle, sys
from torch import nn
scheme = pickle.loads(bytes.fromhex(sys.argv[1]))
model = nn.Linear(3, 2)
scheme.init_on_receiver("policy", model=model, worker_idx=0)
scheme.connect()
while scheme.version < 5:
    scheme.receive(timeout=30.0)
print("bias", model.bias.tolist())
scheme.shutdown()
"""


OTHER_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")  # as on another machine, the trainer's process is not seen


@pytest.mark.parametrize(
    "apart", [pytest.param(OTHER_PIDS, id="group"), pytest.param((), id="memory", marks=pytest.mark.slow)]
)
def test_between_two_hosts(namespace: str, apart: tuple[str, ...]) -> None:
    """A worker that does not see the trainer's process is in a group with it; one that does shares its memory."""
    model = nn.Linear(3, 2)
    scheme = wsync.DistributedWeightSyncScheme(host=HERE, timeout=30.0)
    scheme.init_on_sender("policy", model=model, num_workers=1)
    with scheme:
        travelled = pickle.dumps(scheme).hex()
        command = [*namespace.split(), *apart, sys.executable, "-c", REMOTE, travelled]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as remote:
            scheme.connect()
            for value in range(4):
                nn.init.constant_(model.bias, value)
                scheme.send()
            assert remote.stdout is not None
            assert remote.stdout.read().strip() == "bias [3.0, 3.0]"


# --- tests/attacks.py, in a network of its own ---


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
