"""The HTTP client of commands: what it says of servers that are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from vllm_disagg import http_client
from vllm_disagg.errors import ConfigError

ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # what a server of TLS answers to plain HTTP


@pytest.fixture(params=[b"SSH-2.0-OpenSSH_9\r\n", ALERT])
def foreign(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server that answers one connection with other bytes than HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(request.param)
                connection.recv(65536)

        threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]


def test_a_server_of_another_protocol(foreign: int) -> None:
    url = f"http://127.0.0.1:{foreign}"
    with pytest.raises(ConfigError) as raised:
        http_client.get(url, "/metrics")
    assert str(raised.value) == (
        f"cannot reach {url}: its answer is no HTTP: another server has that port, or it serves"
        " https"
    )


def test_https_to_a_server_of_http(foreign: int) -> None:
    with pytest.raises(ConfigError, match=r"does it serve http\?$"):
        http_client.get(f"https://127.0.0.1:{foreign}", "/metrics")


def test_a_name_that_no_host_can_have() -> None:
    with pytest.raises(ConfigError, match="no host can have this name"):
        http_client.get(f"http://{'a' * 70}:80", "/metrics")


def test_a_page_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_PAGE_BYTES", 1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes((1 << 20) + 1))

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match="has more than 1 MiB"):
            http_client.get(url, "/metrics")
