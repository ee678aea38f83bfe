"""One stock vLLM server for all tests of the folder; ``make engines`` makes an environment that has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stock_vllm import Server, serving


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
