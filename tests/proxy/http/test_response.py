"""Tests the bytes of answers, without a network."""

import json

import pytest

from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.response import JSON, ResponseEncoder, error_body


def encoder(method: str = "GET", chunked_ok: bool = True) -> ResponseEncoder:
    return ResponseEncoder(HttpRequest(method, chunked_ok=chunked_ok))


@pytest.mark.parametrize(
    ("method", "status", "keep_alive", "text"),
    [
        ("GET", 200, True, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"),
        ("HEAD", 200, True, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"),
        ("GET", 204, True, b"HTTP/1.1 204 No Content\r\n\r\nok"),
        (
            "GET",
            999,
            False,
            b"HTTP/1.1 999 Unknown\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        ),
    ],
)
def test_whole_answers(method: str, status: int, keep_alive: bool, text: bytes) -> None:
    response = encoder(method)
    assert response.encode_whole(status, [], b"ok", keep_alive) == text
    assert response.started and response.ended


def test_a_stream_in_chunks() -> None:
    response = encoder()
    response.begin(200, [], keep_alive=True)
    assert response.started and not response.ended
    first = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    assert response.encode_part(b"abc") == first
    assert response.encode_part(b"0123456789") == b"a\r\n0123456789\r\n"
    assert response.encode_end() == b"0\r\n\r\n"
    assert response.ended


def test_a_stream_for_http10_ends_with_its_connection() -> None:
    response = encoder(chunked_ok=False)
    response.begin(200, [], keep_alive=False)
    assert response.encode_part(b"abc") == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc"
    assert response.encode_part(b"def") == b"def"
    assert response.encode_end() == b""


def test_an_empty_stream_has_a_head() -> None:
    response = encoder()
    response.begin(200, [], keep_alive=True)
    end = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert response.encode_end() == end


def test_parts_after_a_switch_are_unchanged() -> None:
    response = ResponseEncoder(HttpRequest(upgrade=b"websocket"))
    response.extra_headers = [(b"x", b"1")]
    assert response.encode_switch([(b"a", b"b")]) == (
        b"HTTP/1.1 101 Switching Protocols\r\n"
        b"a: b\r\nx: 1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    assert response.encode_part(b"frame") == b"frame"


def test_an_extra_header_that_the_answer_has_comes_once() -> None:
    response = encoder()
    response.extra_headers = [(b"x", b"1"), (b"y", b"2")]
    text = response.encode_whole(200, [(b"x", b"1")], b"", keep_alive=True)
    assert (text.count(b"x: 1"), text.count(b"y: 2")) == (1, 1)


def test_error_bodies() -> None:
    assert json.loads(error_body(400, "bad", "prompt", request_id="")) == {
        "error": {"message": "bad", "type": "BadRequestError", "param": "prompt", "code": 400}
    }
    assert json.loads(error_body(503, "full", request_id=""))["error"]["type"] == "ProxyError"
    assert JSON == (b"content-type", b"application/json")
