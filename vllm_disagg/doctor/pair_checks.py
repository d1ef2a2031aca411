"""Checks whether two instances fit, by what both describe, before any request runs at them."""

from __future__ import annotations

from ..errors import Unmappable
from ..fleet import dialling
from ..kv import reshard
from ..protocol.peers import EngineInfo, differences, different_releases
from ..proxy.http.addresses import host_of, literal
from ..proxy.routing.fleet import mismatch
from . import remedies
from .findings import Report
from .instance_checks import ExaminedInstance

SET_HOST = "set host in its kv_connector_extra_config to an address that the other one reaches"
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST"


def pair_name(prefill: ExaminedInstance, decode: ExaminedInstance) -> str:
    """Returns the name of a pair's findings."""
    return f"pair {prefill.instance.url} + {decode.instance.url}"


def examine_pair(prefill: ExaminedInstance, decode: ExaminedInstance, report: Report) -> bool:
    """Adds what keeps two instances apart; returns whether a transfer is worth a try."""
    name = pair_name(prefill, decode)
    if prefill.version != decode.version and prefill.version and decode.version:
        report.warn(
            name,
            f"vLLM {prefill.version} at the prefill and {decode.version} at the decode instance",
            "finish the roll-out: answers were compared between equal versions only",
        )
    if prefill.tokens != decode.tokens:
        report.fail(
            name,
            "the two make different tokens of one text",
            "serve the same tokenizer files on both: P refuses each prompt of D until then",
        )
        return False
    prefill_engine = prefill.instance.engine
    decode_engine = decode.instance.engine
    if prefill_engine and decode_engine:
        return _fit(name, prefill_engine, decode_engine, prefill, decode, report)
    if why := mismatch(prefill.instance, decode.instance):
        report.fail(name, why, "start both with one connector and one model")
        return False
    return _reaches_side_channel(name, prefill, decode, report)


def _fit(
    name: str,
    prefill: EngineInfo,
    decode: EngineInfo,
    examined_prefill: ExaminedInstance,
    examined_decode: ExaminedInstance,
    report: Report,
) -> bool:
    """Adds each field in which two engines with DisaggConnector differ."""
    fields = list(differences(prefill.layout, decode.layout))
    for fact, at_prefill, at_decode in fields:
        words = f"{fact} is {at_prefill} at P and {at_decode} at D"
        words += different_releases(fact, prefill, decode)
        report.fail(name, words, remedies.of_fact(words))
    if fields:
        return False
    if why := mismatch(examined_prefill.instance, examined_decode.instance):
        report.fail(name, why, "give two engines")
        return False
    if why := _unreadable(prefill, decode):
        report.fail(name, f"the KV of P cannot be read at D: {why}", "change the parallelism")
        return False
    _compare_transports(name, prefill, decode, report)
    return _may_dial(name, prefill, decode, report)


def _unreadable(prefill: EngineInfo, decode: EngineInfo) -> str:
    sources = [worker.holds for worker in prefill.workers]
    targets = [worker.holds for worker in decode.workers]
    try:
        reshard.plan(sources, targets)
    except Unmappable as error:
        return str(error)
    return ""


def _compare_transports(name: str, prefill: EngineInfo, decode: EngineInfo, report: Report) -> None:
    at_prefill = prefill.transports
    at_decode = decode.transports
    if at_prefill != at_decode:
        report.warn(
            name,
            f"transports {', '.join(at_prefill)} at P and {', '.join(at_decode)} at D",
            "set transport and encrypt_data alike, and install the same packages",
        )


def _may_dial(name: str, prefill: EngineInfo, decode: EngineInfo, report: Report) -> bool:
    """Adds whether D dials P's addresses, and whether these can be right."""
    if obstacle := dialling.obstacle(dialling.reach(prefill), dialling.reach(decode)):
        report.fail(name, obstacle, SET_HOST)
        return False
    return True


def _reaches_side_channel(
    name: str, prefill: ExaminedInstance, decode: ExaminedInstance, report: Report
) -> bool:
    """Adds whether D can reach the side channel of a P with NixlConnector."""
    host = prefill.side_channel.rpartition(":")[0]
    is_local = host == "localhost" or (literal(host) is not None and dialling.is_loopback(host))
    if is_local and host_of(prefill.instance.url) != host_of(decode.instance.url):
        report.fail(
            name,
            f"P's side channel is {prefill.side_channel}, and D has another address",
            f"start P with {SIDE_CHANNEL}=ADDRESS that D reaches",
        )
        return False
    return True
