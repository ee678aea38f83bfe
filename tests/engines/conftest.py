"""One stock vLLM server for all tests of the folder; ``make engines`` makes an environment that has it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from stock_vllm import Server, serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm", default="", help="further arguments of the server: '--tensor-parallel-size 2'")


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a Qwen2 with biases and tied embeddings, with random weights; the last test kills its core."""
    with serving(tmp_path_factory.mktemp("model"), str(pytestconfig.getoption("--vllm"))) as server:
        yield server


@pytest.fixture(scope="module")
def another(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """Give another one; if it was killed, it is started again at the same port."""
    folder, stack, servers = tmp_path_factory.mktemp("model"), ExitStack(), list[Server]()

    def living() -> Server:
        with suppress(LookupError):
            if servers and servers[-1].core():
                return servers[-1]
        stack.close()
        port = int(servers[-1].url.rsplit(":", 1)[1]) if servers else 0
        servers.append(stack.enter_context(serving(folder, str(pytestconfig.getoption("--vllm")), port)))
        return servers[-1]

    with stack:
        yield living
