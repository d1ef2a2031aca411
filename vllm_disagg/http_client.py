"""HTTP client of the commands that query a server: address checks and page requests."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import msgspec

from . import bearer_keys
from .errors import ConfigError

PAGE_TIMEOUT_SECONDS = 10.0
MAX_PAGE_BYTES = 16 << 20


class NoListener(ConfigError):
    """No process listens at the address."""


class Unavailable(ConfigError):
    """A process listens at the address, and gave no answer: late, cut, or a status from 500 on."""


class NotFound(ConfigError):
    """The server does not have what the request names."""


def address(flag: str, url: str) -> str:
    """Returns the URL up to its port. Raises ConfigError with the name of the flag."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts = urlsplit("")
        port = None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.path.rstrip("/") not in ("", "/v1")
    ):
        raise ConfigError(f"{flag}: {url} is not a URL such as http://127.0.0.1:8000")
    if ranked := re.fullmatch(r"(.+)@[0-9]{1,4}/?", url):
        raise ConfigError(
            f"{flag}: {url} is a data parallel rank; give the URL of its server, {ranked[1]}"
        )
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"{flag}: {url} has more than a host and a port; an API key goes into OPENAI_API_KEY"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def connect(url: str, timeout: float) -> http.client.HTTPConnection:
    """Returns an HTTP or HTTPS connection, not yet opened."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout)


def headers(key: str = "") -> dict[str, str | bytes]:
    """Returns request headers with `key`, else with the key of OPENAI_API_KEY.

    They are those that `vllm bench serve` sends. Raises ConfigError for what is no key.
    """
    found: dict[str, str | bytes] = {"Content-Type": "application/json"}
    if key := bearer_keys.clean(key, "the key") or bearer_keys.from_environment("OPENAI_API_KEY"):
        found["Authorization"] = f"Bearer {key}".encode()
    return found


def get(
    url: str,
    path: str,
    server: str = "a vLLM, or a proxy in front of one",
    key_name: str = "",
    timeout: float = PAGE_TIMEOUT_SECONDS,
) -> bytes:
    """Requests a page of a `server`. Raises ConfigError on any failure: NoListener, Unavailable.

    `key_name` names an environment variable with a key that takes precedence over OPENAI_API_KEY.
    """
    key = bearer_keys.from_environment(key_name) if key_name else ""
    try:
        status, content = _exchange(url, ("GET", path), None, headers(key), timeout)
    except ConnectionRefusedError as error:
        raise NoListener(f"cannot reach {url}: {reason(error)}: is it running?") from None
    except TimeoutError:
        raise Unavailable(f"cannot reach {url}: no answer within {timeout:g} s") from None
    except (ConnectionError, http.client.IncompleteRead) as error:
        raise Unavailable(f"cannot reach {url}: {reason(error)}") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise ConfigError(f"cannot reach {url}: {reason(error)}: {_remedy(error)}") from None
    if status in (401, 403):
        names = " or ".join(filter(None, ["OPENAI_API_KEY", key_name]))
        raise ConfigError(f"{url}{path} needs a key: put it into the environment as {names}")
    if status >= 500:
        raise Unavailable(f"{url}{path} answered {status}")
    if status != 200:
        raise ConfigError(f"{url}{path} answered {status}: it is not {server}")
    return content


def send(url: str, request: tuple[str, str], body: object, key: str, name: str) -> None:
    """Sends a JSON body with a key. Raises ConfigError unless the answer is 200: NotFound for 404.

    `request`: method and path. `name`: of the request, in the error.
    """
    try:
        status, content = _exchange(
            url, request, msgspec.json.encode(body), headers(key), PAGE_TIMEOUT_SECONDS
        )
    except TimeoutError:
        raise ConfigError(
            f"cannot reach {url}: no answer within {PAGE_TIMEOUT_SECONDS:g} s"
        ) from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise ConfigError(f"cannot reach {url}: {reason(error)}") from None
    if status != 200:
        kind = NotFound if status == 404 else ConfigError
        text = " ".join(content.decode(errors="replace").split())
        raise kind(f"{urlsplit(url).netloc} answered {status} to {name}: {text}")


def _exchange(
    url: str,
    request: tuple[str, str],
    body: bytes | None,
    request_headers: dict[str, str | bytes],
    timeout: float,
) -> tuple[int, bytes]:
    """Sends a request; returns status and body of the answer, which is whole.

    Raises TimeoutError if it is not over in time, and IncompleteRead for a body that was cut.
    """
    connection = connect(url, timeout)
    try:
        connection.connect()
        with _time_limit(connection.sock, timeout):
            connection.request(*request, body, request_headers)
            answer = connection.getresponse()
            content = answer.read(MAX_PAGE_BYTES + 1)
    finally:
        connection.close()
    if len(content) > MAX_PAGE_BYTES:
        raise ConfigError(f"{url}{request[1]} has more than {MAX_PAGE_BYTES >> 20} MiB")
    if answer.length:  # bytes that its head announced, and that did not come
        raise http.client.IncompleteRead(content, answer.length)
    return answer.status, content


@contextmanager
def _time_limit(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Cuts a connection after so long, and raises TimeoutError then.

    The socket's own limit begins anew with each byte.
    """
    is_over = threading.Event()

    def cut() -> None:
        is_over.set()
        with suppress(OSError):
            # Not the method of TLS: it would take the state from under the read.
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError


def _remedy(error: Exception) -> str:
    """Returns what to do about a server that did not answer in HTTP."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "name the file of its authority in the environment as SSL_CERT_FILE"
    if isinstance(error, ssl.SSLError):
        return "does it serve http?"
    if isinstance(error, http.client.HTTPException):
        return "another server has that port, or it serves https"
    return "is it running?"


def reason(error: Exception) -> str:
    """Returns the short text of an error, in one line."""
    if isinstance(error, UnicodeError):
        return "no host can have this name"
    if isinstance(error, http.client.IncompleteRead):
        return "its answer was cut"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
        return "its answer is no HTTP"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())
