"""Reads and writes header lists and message heads, for both sides of HTTP."""

from __future__ import annotations

import re
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]  # names in lower case

RANK_HEADER = b"x-data-parallel-rank"  # selects an engine behind vLLM's API server
# On each request of a proxy to an instance. Another proxy, or the same one, refuses such a request
# with LOOP_STATUS: an instance must be an engine, and a request could go in a circle.
FORWARDED_HEADER = b"x-disagg-forwarded"
LOOP_STATUS = 508

REASON_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}

# Fields for one connection only (RFC 9110, 7.6.1), and those that the proxy sets anew.
_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization "
    b"te trailer transfer-encoding upgrade content-length".split()
)
# Without accept-encoding, since an encoded stream could not be cut at events. Without origin: the
# proxy alone decides on origins, and vLLM admits all by default.
_HOP_OF_REQUESTS = _HOP | {b"host", b"expect", b"accept-encoding", b"origin"}
_HOP_OF_ANSWERS = _HOP | set(
    b"access-control-allow-origin access-control-allow-credentials access-control-allow-methods "
    b"access-control-allow-headers access-control-expose-headers access-control-max-age".split()
)

# RFC 3986, 3.2.2: a name or an address, and a port.
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z:.]+\])(?::[0-9]{0,5})?")


def end_to_end(headers: Headers, request: bool = False) -> Headers:
    """Returns the headers that a proxy passes on."""
    drop = _HOP_OF_REQUESTS if request else _HOP_OF_ANSWERS
    kept: Headers = []
    options: set[bytes] = set()  # of this connection: names of fields that go no further
    for header in headers:
        if header[0] not in drop:
            kept.append(header)
        elif header[0] == b"connection":
            options.update(option.strip().lower() for option in header[1].split(b","))
    return [header for header in kept if header[0] not in options] if options else kept


def without_upgrade(headers: Headers) -> Headers:
    """Returns the headers without the offer of another protocol."""
    kept: Headers = []
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() != b"upgrade")
        if name != b"upgrade":
            kept.append((name, value))
    return kept


def origin_form(url: bytes, headers: Headers) -> tuple[bytes, Headers]:
    """Returns a request's target as a path, and the headers with the host that the target named.

    RFC 9112, 3.2.2. `url` itself is returned if it named none.
    """
    scheme, found, rest = url.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        return url, headers
    host = rest.partition(b"?")[0].partition(b"/")[0]
    rest = rest[len(host) :]
    target = rest if rest.startswith(b"/") else b"/" + rest
    return target, [(b"host", host), *(header for header in headers if header[0] != b"host")]


def host_problem(headers: Headers, needed: bool) -> tuple[int, str] | None:
    """Returns status and message for a Host field that RFC 9112, 3.2 forbids, else None."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (needed and not hosts):
        return 400, "a request must have one Host header"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return 400, "the request's Host header is not valid"
    return None


def plain_path(path: str) -> str:
    """Returns a path with one slash in front and none at its end, as FastAPI serves it."""
    if path.startswith("//"):
        path = "/" + path.lstrip("/")
    return path.rstrip("/") or "/"


def head(start: bytes, headers: Headers) -> bytes:
    """Returns the bytes of a message head."""
    return b"\r\n".join([start, *map(b": ".join, headers), b"\r\n"])


def find(headers: Headers, name: bytes) -> bytes:
    """Returns the first value of a header, empty if there is none."""
    for key, value in headers:
        if key == name:
            return value
    return b""
