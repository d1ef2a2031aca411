"""Judges the answer of one leg: when it has started, and whether it is a failure.

D's refusal of the client's request (4xx) is an answer, not a failure: other D would give it, too.
Only what D has not (404), another one may have. P may refuse what D serves, so D decides
(`failover.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from ..http.headers import find
from ..http.reasons import STOPPING_DETAIL, Reason
from ..http.request import HttpRequest
from ..http.upstream_response import HOLD_BYTES, Unreachable, UpstreamResponse
from ..membership.engine_answers import engine_in, report_in
from ..routing.fleet import Instance
from ..routing.pairing import InstancePair
from .attempt import Attempt
from .completeness import doubtful
from .first_content import ContentState, FirstContentDetector
from .streams import aborted, engine_failed, failure_in

# How often a request's size may be contained in the events before the first content: two of them
# repeat parts of the request.
MAX_ECHOES = 4
MAX_ERROR_BYTES = 500  # bytes of an error event that are passed on to a client


class AnswerProblem(NamedTuple):
    """The failure that an answer shows."""

    reason: Reason
    detail: str
    answer: UpstreamResponse | None  # for the client, if no other instance succeeds


CUT_OFF = AnswerProblem("stopping", STOPPING_DETAIL, None)


async def until_started(request: HttpRequest, answer: UpstreamResponse) -> bytes:
    """Waits until an answer has started or is complete; returns an error event at its start.

    Raises Unreachable.
    """
    if answer.status != 200 or not answer.is_stream:
        await answer.read()
        return b""
    if find(answer.headers, b"content-encoding"):  # compressed: events cannot be parsed
        await answer.first_byte()
        return b""
    detector = FirstContentDetector(request.path)
    max_held_bytes = HOLD_BYTES + MAX_ECHOES * len(request.body)
    if not await answer.read_until(
        lambda data: detector.feed(data) is not ContentState.NOT_YET, max_held_bytes
    ):
        detector.feed(b"\n\n")  # the end of the body ends its last event
        if detector.state is ContentState.NOT_YET:
            raise Unreachable("died", "the stream ended before its first content")
    if detector.state is ContentState.EMPTY:
        raise Unreachable("stopping", STOPPING_DETAIL)
    return detector.failure


def find_problem(path: str, answer: UpstreamResponse, error_event: bytes) -> AnswerProblem | None:
    """Returns the failure that a started answer shows; None for a good answer or a refusal.

    `error_event`: the result of `until_started`.
    """
    if error_event:
        return AnswerProblem(failure_in(error_event), _error_detail(error_event), None)
    content = answer.peek()
    if answer.status >= 500 or engine_failed(content):
        return AnswerProblem(failure_in(content), f"it answered {answer.status}", answer)
    if _is_aborted(path, answer, content):
        return CUT_OFF
    if not 200 <= answer.status < 500:
        return AnswerProblem("garbled", f"it answered {answer.status}", answer)
    return None


def _is_aborted(path: str, answer: UpstreamResponse, content: bytes) -> bool:
    """Whether a stopping engine aborted this answer; of a stream, its beginning is judged."""
    if aborted(content):
        return True
    if path != "/v1/messages" or answer.status != 200 or answer.is_stream:
        return False
    # A whole message has a stop reason; an aborted one has not.
    return b'"type":"message"' in content and b'"stop_reason":' not in content


def may_be_cut_off(attempt: Attempt, instance: Instance, answer: UpstreamResponse) -> bool:
    """Whether an answer for the client is whole and looks complete, but may have been cut off."""
    if answer.status != 200 or answer.is_stream or instance is not attempt.server:
        return False
    context = attempt.context
    if context.body.uses_beam_search:
        return True
    return doubtful(context.request.path, answer.peek(), instance.engine)


def _error_detail(event: bytes) -> str:
    """Returns one line for people about an error event."""
    return f"it began with an error: {event[:MAX_ERROR_BYTES].decode(errors='replace')}"


def verify_prefill(
    path: str, pair: InstancePair, content: bytes, asked_at: float, now: float
) -> str:
    """Verifies that the process named in D's grant gave a prefill leg's answer.

    Returns why the answer is of no use for D; "" if it is. Notes the answer's facts at both
    instances.
    """
    instance = pair.prefill
    report = report_in(content)
    if report and report.clock is not None:
        instance.set_clock(report.clock, asked_at, now)
    if report and not report.workers:
        # Its clock may differ from what the proxy assumed. D's may too, and D reports nothing.
        instance.needs_probe = True
        pair.decode.needs_probe = True
        return "the prefill instance has refused its grant"
    if not report or report.rank != instance.rank:
        # An old version of vLLM at a new endpoint ignores grants; or it was restarted without
        # the connector, or with more ranks.
        instance.unsupported_paths.add(path)
        instance.needs_probe = True
        if report:
            return "another data parallel rank answered"
        return "the prefill instance says nothing of KV transfers"
    if not instance.engine or report.incarnation != instance.engine.incarnation:
        instance.on_probe_answered(instance.model, engine_in(content), instance.models)
        instance.needs_probe = True
        return "the prefill instance was restarted"
    return ""
