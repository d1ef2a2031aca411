"""Tests the states of a connection, their time limits, and the steps between two requests."""

from itertools import product

import pytest

from vllm_disagg.proxy.http.connection_state import (
    IDLE,
    LINGERING,
    READING_BODY,
    READING_HEAD,
    REFUSED,
    SWITCHING,
    AfterAnswer,
    ConnectionState,
    deadline,
    lingers_on,
    refusal_at_deadline,
    step_after_answer,
    successor,
)
from vllm_disagg.proxy.http.limits import LINGER_SECONDS, MAX_LINGER_SECONDS, Limits

FOLLOWS = {
    (IDLE, READING_HEAD),
    (IDLE, REFUSED),
    (IDLE, SWITCHING),
    (READING_HEAD, READING_BODY),
    (READING_HEAD, REFUSED),
    (READING_BODY, IDLE),
    (READING_BODY, REFUSED),
    (REFUSED, LINGERING),
}


@pytest.mark.parametrize(("state", "wanted"), list(product(ConnectionState, repeat=2)))
def test_successors(state: ConnectionState, wanted: ConnectionState) -> None:
    if state is wanted or (state, wanted) in FOLLOWS:
        assert successor(state, wanted) is wanted
    else:
        with pytest.raises(RuntimeError, match=f"from {state.name} to {wanted.name}"):
            successor(state, wanted)


@pytest.mark.parametrize(
    ("state", "seconds", "status"),
    [
        (IDLE, 3.0, None),
        (READING_HEAD, 4.0, 408),
        (READING_BODY, 5.0, 408),
        (REFUSED, LINGER_SECONDS, None),
        (LINGERING, LINGER_SECONDS, None),
        (SWITCHING, LINGER_SECONDS, None),
    ],
)
def test_time_limits(state: ConnectionState, seconds: float, status: int | None) -> None:
    limits = Limits(idle_seconds=3.0, header_seconds=4.0, body_seconds=5.0)
    assert deadline(state, limits, now=100.0) == 100.0 + seconds
    refusal = refusal_at_deadline(state)
    assert (refusal[0] if refusal else None) == status
    assert state.is_reading == (status is not None)


def test_a_client_that_has_not_read_all_gets_more_time_within_a_limit() -> None:
    assert lingers_on(LINGER_SECONDS, has_unread_bytes=True)
    assert not lingers_on(LINGER_SECONDS, has_unread_bytes=False)
    assert not lingers_on(MAX_LINGER_SECONDS, has_unread_bytes=True)


def test_only_refused_connections_drop_bytes() -> None:
    assert {state for state in ConnectionState if state.drops_bytes} == {REFUSED, LINGERING}


@pytest.mark.parametrize(
    ("ended", "refuses_more", "keeps_alive", "reads_slowly", "step"),
    [
        (True, False, True, False, AfterAnswer.NEXT_REQUEST),
        (True, False, True, True, AfterAnswer.AWAIT_READER),
        (True, False, False, False, AfterAnswer.CLOSE),
        (True, False, False, True, AfterAnswer.CLOSE),
        (True, True, True, True, AfterAnswer.LINGER),
        (True, True, False, False, AfterAnswer.LINGER),
        (False, False, True, False, AfterAnswer.ABORT),
        (False, True, False, True, AfterAnswer.ABORT),
    ],
)
def test_step_after_an_answer(
    ended: bool, refuses_more: bool, keeps_alive: bool, reads_slowly: bool, step: AfterAnswer
) -> None:
    assert step_after_answer(ended, refuses_more, keeps_alive, reads_slowly) is step
