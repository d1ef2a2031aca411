"""Sends the proxy's own errors, in the form that fits the path and the state of the answer."""

from __future__ import annotations

import msgspec

from .connection import Connection
from .headers import find
from .response import JSON, error_body
from .sse import DONE


class RequestFailed(Exception):
    """Ends a request with an error of the proxy. `retry_after`: seconds, or 0 for no header."""

    def __init__(self, status: int, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def end_stream(client: Connection, status: int, message: str) -> None:
    """Ends a stream that has begun with an error event, or a WebSocket with a Close frame.

    An encoded stream gets neither an event, which its decoder could not read, nor an end: then the
    connection is cut when the handler returns.
    """
    if find(client.response.headers, b"content-encoding"):
        return
    close_frame = client.response.close_frame
    request_id = client.response.request.request_id
    if close_frame:
        client.write(close_frame(status, message))
    elif client.path == "/v1/messages":
        error: dict[str, object] = {
            "type": "error",
            "error": {"type": "api_error", "message": message},
            "request_id": request_id,
        }
        client.write(b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n")
    else:
        body = error_body(status, message, request_id=request_id)
        client.write(b"data: " + body + b"\n\n" + DONE)
    client.end()


def answer_error(
    client: Connection, status: int, message: str, param: str | None = None, retry_after: int = 0
) -> None:
    """Sends an error: as an answer, or inside one that has started; not after its end."""
    if client.ended:
        return
    if client.started:
        end_stream(client, status, message)
        return
    headers = [JSON]
    if retry_after:
        headers.append((b"retry-after", b"%d" % retry_after))
    request_id = client.response.request.request_id
    client.answer(status, headers, error_body(status, message, param, request_id=request_id))
