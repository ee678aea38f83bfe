"""One stock vLLM server for all tests of the folder; ``make engines`` makes an environment that has it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stock_vllm import Server, save

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm", default="", help="further arguments of the server: '--tensor-parallel-size 2'")


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a Qwen2 with biases and tied embeddings, with random weights; the last test kills its core."""
    with serving(tmp_path_factory.mktemp("model"), str(pytestconfig.getoption("--vllm"))) as server:
        yield server


@pytest.fixture
def another(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Server]:
    """Another one, for one test."""
    (tmp_path / "model").mkdir()
    with serving(tmp_path / "model", str(pytestconfig.getoption("--vllm"))) as server:
        yield server


@contextmanager
def serving(folder: Path, options: str) -> Iterator[Server]:
    save(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"""{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name tiny
        --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8
        --enable-scale-out --worker-extension-cls faults.Faults {options}""".split()
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--weight-transfer-config", '{"backend": "wsync"}'],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(log.read_text()[-4000:])  # shown where a test has failed
