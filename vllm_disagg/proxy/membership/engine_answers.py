"""What the answers and metrics pages of an engine state. They are bytes of another program."""

from __future__ import annotations

import re

import msgspec

from ...fleet.grants import ANSWER_KEY, REFUSED_KEY
from ...protocol.peers import EngineCard, EngineInfo
from ..routing.fleet import TRANSFERS_OFF

MAX_REASON_CHARACTERS = 200  # of an instance's own words


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class EngineReport(msgspec.Struct, frozen=True):
    """The part of an EngineInfo by which each prefill leg's answer is verified.

    The layouts of an engine's workers are large, and equal as long as the incarnation is.
    """

    incarnation: str
    clock: float | None = None
    rank: int | None = None
    workers: msgspec.Raw = msgspec.Raw()  # empty in an EngineCard


class _Completion(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


class _ReportParams(msgspec.Struct):
    disagg_engine: EngineReport | None = None  # ANSWER_KEY


class _ReportingCompletion(msgspec.Struct):
    kv_transfer_params: _ReportParams | None = None


class _ProbeChoice(msgspec.Struct):
    finish_reason: str | None = None


class _ProbeAnswer(msgspec.Struct):
    choices: list[_ProbeChoice] = []


# NixlConnector's request parameters for a prompt's KV, and the key that marks its answer.
NIXL_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NIXL_KEY = "remote_engine_id"
KV_CACHE_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(\{[^\n]*\})? (\S+)$", re.MULTILINE)
# vLLM splits its waiting requests by reason: the others wait for KV that is under way.
WAITING = re.compile(
    rb'^vllm:num_requests_waiting_by_reason(\{[^\n]*reason="capacity"[^\n]*\}) (\S+)$',
    re.MULTILINE,
)
decode_models = msgspec.json.Decoder(_ModelList).decode
decode_probe = msgspec.json.Decoder(_ProbeAnswer).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_engine = msgspec.json.Decoder(EngineInfo).decode
_decode_card = msgspec.json.Decoder(EngineCard).decode
_decode_reporting = msgspec.json.Decoder(_ReportingCompletion).decode
# Errors of decoding bytes that another program sent.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def engine_in(answer: bytes) -> EngineInfo | None:
    """Returns an engine's description from a completion's answer; None if it has no valid one."""
    try:
        return _decode_engine((_decode_completion(answer).kv_transfer_params or {})[ANSWER_KEY])
    except (KeyError, *DECODE_ERRORS):
        return None


def card_in(answer: bytes) -> EngineCard | None:
    """Returns an engine's card, which an answer has even if a grant was refused; else None."""
    try:
        return _decode_card((_decode_completion(answer).kv_transfer_params or {})[ANSWER_KEY])
    except (KeyError, *DECODE_ERRORS):
        return None


def report_in(answer: bytes) -> EngineReport | None:
    """Returns an engine's report from a completion's answer, without its workers' layouts."""
    try:
        params = _decode_reporting(answer).kv_transfer_params
    except DECODE_ERRORS:
        return None
    return params.disagg_engine if params else None


def params_in(answer: bytes) -> dict[str, msgspec.Raw] | None:
    """Returns NixlConnector's parameters for the decode leg; None if there is nothing to read."""
    try:
        params = _decode_completion(answer).kv_transfer_params
    except DECODE_ERRORS:
        return None
    return params if params and bytes(params.get(_NIXL_KEY, b"null")) != b"null" else None


def refusal_in(answer: bytes) -> str:
    """Returns why a connector has described no engine; empty if no connector has answered."""
    try:
        raw = (_decode_completion(answer).kv_transfer_params or {})[ANSWER_KEY]
        found = msgspec.json.decode(raw)
    except (KeyError, *DECODE_ERRORS):
        return ""
    if found is None:
        return TRANSFERS_OFF
    reason = found.get(REFUSED_KEY, "") if isinstance(found, dict) else ""
    return reason[:MAX_REASON_CHARACTERS] if isinstance(reason, str) else ""


def values(series: re.Pattern[bytes], page: bytes, label: int | None) -> list[float]:
    """Returns the values of a series on a metrics page; of one data parallel rank, if given."""
    rank_label = b"" if label is None else b'engine="%d"' % label
    return [float(value) for labels, value in series.findall(page) if rank_label in labels]
