"""Tests the reading of requests without a network: states, and each limit at its edge."""

from __future__ import annotations

import pytest

from vllm_disagg.proxy.http.connection_state import (
    IDLE,
    LINGERING,
    READING_BODY,
    READING_HEAD,
    REFUSED,
    SWITCHING,
    ConnectionState,
)
from vllm_disagg.proxy.http.limits import (
    MAX_EARLY_BYTES,
    MAX_HEADERS,
    SLICE_BYTES,
    BudgetShare,
    ByteBudget,
    Limits,
)
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.request_reader import RequestReader

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
EXPECT = b"expect: 100-continue\r\n"
H2C = b"connection: upgrade\r\nupgrade: h2c\r\n"
WEBSOCKET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


def post(body: bytes, fields: bytes = b"") -> bytes:
    return HEAD + fields + b"content-length: %d\r\n\r\n" % len(body) + body


def make_reader(
    limits: Limits | None = None, body_limit: int | None = None, held_bytes: int = 0
) -> RequestReader:
    """Returns a reader; `held_bytes`: those of other connections."""
    limits = limits or Limits()
    budget = ByteBudget(limits.all_bodies_bytes)
    budget.held_bytes = held_bytes
    max_bytes = limits.body_bytes if body_limit is None else body_limit
    return RequestReader(limits, budget, lambda _: max_bytes)


def statuses(reader: RequestReader) -> list[int]:
    """Returns the refusals' statuses in order, and 0 for each request without one."""
    return [request.refusal[0] if request.refusal else 0 for request in reader.ready]


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "state", "ready"),
    [
        (b"\r\n", READING_HEAD, []),
        (b"G", READING_HEAD, []),
        (GET[:-1], READING_HEAD, []),
        (GET, IDLE, [0]),
        (GET + GET, IDLE, [0, 0]),
        (GET + b"G", READING_HEAD, [0]),
        (post(b"abc")[:-3], READING_BODY, []),
        (post(b"abc")[:-1], READING_BODY, []),
        (post(b"abc"), IDLE, [0]),
        (CHUNKED + b"1\r\na\r\n0\r\n", READING_BODY, []),
        (CHUNKED + b"1\r\na\r\n0\r\n\r\n", IDLE, [0]),
        (b"NONSENSE\r\n", REFUSED, [400]),
        (GET + b"NONSENSE\r\n" + GET, REFUSED, [0, 400]),
        (WEBSOCKET, SWITCHING, [0]),
        (b"CONNECT h:1 HTTP/1.1\r\nhost: x\r\n\r\nabc", REFUSED, [0]),
        (HEAD + H2C + b"\r\n", IDLE, [0]),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_states(data: bytes, state: ConnectionState, ready: list[int], step: int) -> None:
    reader = make_reader()
    for at in range(0, len(data), step):
        if reader.state in (REFUSED, SWITCHING):
            break  # as `Connection` does
        reader.feed(data[at : at + step])
    assert reader.state is state
    assert statuses(reader) == ready


def test_a_refusal_ends_in_lingering_only() -> None:
    reader = make_reader()
    reader.refuse(503, "too many connections")
    reader.refuse(408, "a second refusal has no effect")
    assert statuses(reader) == [503]
    reader.linger()
    assert reader.state is LINGERING
    with pytest.raises(RuntimeError):
        reader.refuse(400, "after the last answer")


def test_bytes_behind_a_handshake_are_early_bytes() -> None:
    reader = make_reader()
    reader.feed(WEBSOCKET + b"frames")
    request = reader.ready[0]
    assert (request.upgrade, request.keep_alive) == (b"websocket", False)
    assert reader.take_early(100) == b"frames"


def test_bytes_behind_a_pipelined_handshake_keep_their_place_and_are_counted() -> None:
    budget = ByteBudget(1 << 20)
    reader = RequestReader(Limits(), budget, lambda _: 1 << 20)
    frames = b"first, " * SLICE_BYTES + b"second"
    reader.keep_early(WEBSOCKET + frames, HttpRequest())
    reader.feed(b"")
    assert budget.held_bytes == len(frames)
    assert reader.take_early(len(frames)) == frames
    assert budget.held_bytes == 0


def test_bytes_behind_a_connect_are_dropped() -> None:
    reader = make_reader()
    reader.feed(b"CONNECT h:1 HTTP/1.1\r\nhost: x\r\n\r\nabc")
    assert reader.take_early(100) == b""


@pytest.mark.parametrize("data", [b"", b"\r\n", b"G", b"POST /next HTTP/1.1\r\n", b"\0"])
def test_a_refusal_has_nothing_of_the_request_before(data: bytes) -> None:
    reader = make_reader()
    reader.feed(b"HEAD /last HTTP/1.1\r\nhost: x\r\n\r\n")
    reader.ready.clear()
    reader.feed(data)
    reader.refuse(408, "the request did not arrive in time")
    (refused,) = reader.ready
    assert (refused.method, refused.path) == ("", "")


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked"])
def test_a_body_of_another_coding_is_refused(codings: bytes) -> None:
    reader = make_reader()
    reader.feed(HEAD + b"transfer-encoding: " + codings + b"\r\n\r\n")
    assert statuses(reader) == [400]


# -- limits of one request -------------------------------------------------------------------------


@pytest.mark.parametrize(("spare", "expected"), [(0, [0]), (-1, [431])])
def test_size_of_a_head(spare: int, expected: list[int]) -> None:
    head = b" /long HTTP/1.1\r\nhost: x\r\na: b\r\n\r\n"  # without its method
    reader = make_reader(Limits(header_bytes=len(head) + spare))
    reader.feed(b"GET" + head)
    assert statuses(reader) == expected


@pytest.mark.parametrize(("size", "expected"), [(100, []), (101, [431])])
def test_size_of_a_head_without_an_end(size: int, expected: list[int]) -> None:
    reader = make_reader(Limits(header_bytes=100))
    reader.feed((b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * 100)[:size])
    assert statuses(reader) == expected


@pytest.mark.parametrize(("count", "expected"), [(MAX_HEADERS, [0]), (MAX_HEADERS + 1, [431])])
def test_number_of_headers(count: int, expected: list[int]) -> None:
    reader = make_reader()
    reader.feed(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (count - 1) + b"\r\n")
    assert statuses(reader) == expected


def test_number_of_headers_without_an_end() -> None:
    """Headers as objects take many times their bytes."""
    reader = make_reader()
    reader.feed(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (MAX_HEADERS + 1))
    assert statuses(reader) == [431]


@pytest.mark.parametrize(("size", "expected"), [(100, [0]), (101, [413])])
@pytest.mark.parametrize("chunked", [False, True])
def test_size_of_a_body(size: int, expected: list[int], chunked: bool) -> None:
    reader = make_reader(body_limit=100)
    body = b"x" * size
    reader.feed(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else post(body))
    assert statuses(reader) == expected


def test_a_body_limit_of_0_keeps_no_byte() -> None:
    reader = make_reader(body_limit=0)
    reader.feed(post(b"abc") + GET)
    (request,) = reader.ready
    assert (request.body, request.keep_alive, request.refusal) == (b"", False, None)
    assert reader.state is REFUSED


@pytest.mark.parametrize(("size", "expected"), [(100, []), (101, [431])])
@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"1;x="])
def test_size_between_the_parts_of_a_body(begin: bytes, size: int, expected: list[int]) -> None:
    reader = make_reader(Limits(header_bytes=100))
    reader.feed(CHUNKED)
    reader.feed(begin + b"a" * (size - len(begin)))
    assert statuses(reader) == expected


# -- limits of all connections ---------------------------------------------------------------------


@pytest.mark.parametrize(("held", "expected"), [(900, [0]), (901, [503])])
@pytest.mark.parametrize("chunked", [False, True])
def test_all_bodies_together(held: int, expected: list[int], chunked: bool) -> None:
    reader = make_reader(Limits(all_bodies_bytes=1000), held_bytes=held)
    body = b"x" * 100
    reader.feed(CHUNKED + b"64\r\n%b\r\n0\r\n\r\n" % body if chunked else post(body))
    assert statuses(reader) == expected


def test_a_share_gives_back_what_it_holds() -> None:
    budget = ByteBudget(100)
    first = BudgetShare(budget)
    second = BudgetShare(budget)
    assert first.hold(60) and second.hold(40)
    assert not second.hold(1)
    second.release(1)
    assert first.has_room(0) and not first.has_room(1)
    second.release_all()
    second.release(10)  # as a handler does that ends after its connection
    assert budget.held_bytes == 60


def test_a_closed_reader_holds_nothing() -> None:
    budget = ByteBudget(1000)
    reader = RequestReader(Limits(), budget, lambda _: 1000)
    reader.feed(post(b"x" * 10) + post(b"x" * 20)[:-1])
    reader.keep_early(b"x" * 40, HttpRequest())
    assert budget.held_bytes == 10 + 19 + 40
    reader.close()
    assert (budget.held_bytes, len(reader.ready), len(reader.early_bytes)) == (0, 0, 0)


def test_a_request_without_its_body_gets_nothing_of_a_later_head() -> None:
    reader = make_reader(body_limit=0)
    reader.feed(post(b"x") + post(b"y", b"authorization: Bearer k\r\n"))
    (request,) = reader.ready
    assert [name for name, _ in request.headers] == [b"host", b"content-length"]


# -- early bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body_limit", [100, MAX_EARLY_BYTES, 1 << 20])
@pytest.mark.parametrize(("beside", "fits"), [(0, True), (1, False)])
def test_number_of_early_bytes(body_limit: int, beside: int, fits: bool) -> None:
    """One body may come early, and as much beside it, but at most MAX_EARLY_BYTES."""
    reader = make_reader(body_limit=body_limit)
    size = body_limit + min(body_limit, MAX_EARLY_BYTES) + beside
    assert reader.keep_early(b"x", HttpRequest())
    assert reader.keep_early(b"x" * (size - 1), HttpRequest()) == fits
    assert len(reader.early_bytes) == (size if fits else 0)
    assert reader._share.has_room(Limits().all_bodies_bytes) != fits


@pytest.mark.parametrize(("held", "fits"), [(900, True), (901, False)])
def test_early_bytes_count_for_all_connections(held: int, fits: bool) -> None:
    reader = make_reader(Limits(all_bodies_bytes=1000), held_bytes=held)
    assert reader.keep_early(b"x" * 100, HttpRequest()) == fits


def test_early_bytes_are_taken_in_order() -> None:
    reader = make_reader()
    reader.keep_early(b"abc", HttpRequest())
    reader.keep_early(b"def", HttpRequest())
    assert [reader.take_early(4), reader.take_early(4), reader.take_early(4)] == [
        b"abcd",
        b"ef",
        b"",
    ]


def test_one_read_of_many_requests_is_parsed_in_slices() -> None:
    """A parsed request takes many times its bytes, and no budget counts it."""
    budget = ByteBudget(1 << 30)
    reader = RequestReader(Limits(), budget, lambda _: 1 << 20)
    count = 10_000
    reader.feed(GET * count)
    parsed = len(reader.ready)
    while reader.early_bytes:
        assert len(reader.ready) <= SLICE_BYTES // len(GET) + 1
        assert budget.held_bytes == len(reader.early_bytes)
        reader.ready.clear()
        reader.feed(b"")
        parsed += len(reader.ready)
    assert (parsed, budget.held_bytes, reader.state) == (count, 0, IDLE)


@pytest.mark.parametrize(("beside", "expected"), [(0, IDLE), (1, REFUSED)])
def test_one_read_leaves_no_more_early_bytes_than_many(
    beside: int, expected: ConnectionState
) -> None:
    budget = ByteBudget(1 << 30)
    reader = RequestReader(Limits(), budget, lambda _: MAX_EARLY_BYTES)
    first = b"GET / HTTP/1.1\r\nhost: x\r\na: ".ljust(SLICE_BYTES - 4, b"a") + b"\r\n\r\n"
    reader.feed(first + b"x" * (2 * MAX_EARLY_BYTES + beside))
    (request,) = reader.ready
    assert reader.state is expected
    assert request.keep_alive == (expected is IDLE)
    assert budget.held_bytes == len(reader.early_bytes) == (1 - beside) * 2 * MAX_EARLY_BYTES


def test_bytes_that_have_waited_keep_their_place_behind_a_smaller_request() -> None:
    """Their limit was that of the request behind which they came."""
    reader = RequestReader(
        Limits(), ByteBudget(1 << 30), lambda request: 1 << 20 if request.path == "/" else 0
    )
    second = b"GET /small HTTP/1.1\r\nhost: x\r\na: ".ljust(SLICE_BYTES - 4, b"a") + b"\r\n\r\n"
    reader.keep_early(second + post(b"x" * 200_000), HttpRequest(path="/"))
    reader.feed(b"")
    assert (reader.state, len(reader.ready)) == (IDLE, 1)
    reader.ready.clear()
    reader.feed(b"")
    assert [len(request.body) for request in reader.ready] == [200_000]


@pytest.mark.parametrize("data", [b"NONSENSE\r\n", CHUNKED + b"x\r\n"])
def test_nothing_behind_an_error_is_kept(data: bytes) -> None:
    budget = ByteBudget(1 << 30)
    reader = RequestReader(Limits(), budget, lambda _: 1 << 20)
    reader.feed(data + b"x" * 100_000)
    assert statuses(reader) == [400]
    assert (budget.held_bytes, len(reader.early_bytes)) == (0, 0)


@pytest.mark.parametrize("length_known", [True, False])
def test_a_long_body_in_one_read(length_known: bool) -> None:
    """It fits just into the budget."""
    body = b"x" * 200_000
    reader = make_reader(Limits(all_bodies_bytes=len(body) + len(GET)))
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    reader.feed(post(body) + GET if length_known else CHUNKED + chunks)
    assert statuses(reader) == [0]
    assert reader.ready[0].body == body
    assert bytes(reader.early_bytes) == (GET if length_known else b"")


def test_a_long_body_that_has_waited() -> None:
    body = b"x" * 200_000
    reader = make_reader(Limits(all_bodies_bytes=len(post(body))))
    reader.keep_early(post(body), HttpRequest())
    reader.feed(b"")
    assert statuses(reader) == [0]
    assert reader.ready[0].body == body


# -- 100 Continue ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "due"),
    [
        (post(b"abc", EXPECT)[:-3], True),
        (post(b"abc", EXPECT), False),
        (post(b"abc", EXPECT) + GET, False),
        (post(b"abc", EXPECT) + post(b"abc")[:-3], False),
        (post(b"abc", EXPECT) + post(b"abc", EXPECT)[:-3], True),
        (post(b"abc", EXPECT)[:-3] + b"ab", True),
        (post(b"abc", EXPECT + H2C)[:-3], True),
        (post(b"abc"), False),
        (post(b"", EXPECT), False),
        (GET + post(b"abc", EXPECT)[:-3], True),
        (HEAD + H2C + b"\r\n" + post(b"abc", EXPECT + H2C)[:-3], True),
        (post(b"abc", EXPECT).replace(b"HTTP/1.1", b"HTTP/1.0")[:-3], False),
        (post(b"x" * 101, EXPECT), False),
    ],
)
def test_who_gets_continue(data: bytes, due: bool) -> None:
    reader = make_reader(body_limit=100)
    reader.feed(data)
    assert reader.continue_due == due


def test_no_continue_after_a_refusal() -> None:
    reader = make_reader()
    reader.feed(post(b"abc", EXPECT)[:-3])
    reader.refuse_more()
    assert not reader.continue_due
