"""Weights over https."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from asgi_server import serve
from http_engines import TOKEN, trainer

import wsync
from wsync.testing.models import Small


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a self-signed certificate of 127.0.0.1, and its key."""
    command = shutil.which("openssl") or pytest.skip("there is no openssl command")
    made = tmp_path / "made.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=engine -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [command, *options.split(), "-keyout", made, "-out", tmp_path / "own.pem"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    made.write_bytes(made.read_bytes() + (tmp_path / "own.pem").read_bytes())
    return made


def test_only_a_trusted_engine_is_sent_anything(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Small()
    with serve(wsync.engine_app(target, token=TOKEN), ssl_certfile=certificate, ssl_keyfile=certificate) as served:
        url = served.replace("http:", "https:")
        with pytest.raises(wsync.SyncTimeout, match=r"(?i)certificate"), trainer(url, timeout=3.0):
            pass
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with trainer(url):
            assert target()[0] == 1
