"""Measures the hand-off of KV through a running proxy: `vllm-disagg profile --handoff URL`.

Decode engines with our connector export sums over their loads: the seconds from the end of the
prefill until the KV is in place, and the bytes that were missing at its end. Prompts of several
lengths go through the proxy, one at a time, so that no hand-off waits for another one.
"""

from __future__ import annotations

import random
import time

import msgspec

from .. import http_client
from ..errors import ConfigError, DisaggError
from ..fleet.keys import ADMIN_KEY
from ..planner.commands.engine_profiles import HANDOFF_SUMS
from ..planner.commands.metric_page import MetricSamples, MetricWindow, parse
from ..planner.cost.hardware import MeasuredHandoff
from ..planner.cost.step_fit import added, fit_handoffs
from .instance import ServedModel
from .steps import PROBE_TOKEN_IDS
from .stream import complete

# An answer of one token would come from P alone, without a hand-off.
ANSWER_TOKENS = 2
LENGTH_SHARES = (1.0, 0.5, 0.25)  # of the longest prompt; short ones may stay whole
MIN_HANDOFFS = 10  # for a mean
LEAST_PROMPTS = 12  # the engine may count the last one later
ROLES = ("prefill", "decode")


class _Instance(msgspec.Struct):
    """An entry of /disagg/instances."""

    url: str
    role: str
    usable: bool


def decode_instances(proxy: str) -> list[str]:
    """Returns the addresses of a proxy's decode instances.

    Raises ConfigError if it lacks prefill or decode instances, or these are data parallel ranks.
    """
    page = http_client.get(proxy, "/disagg/instances", "a vllm-disagg proxy", ADMIN_KEY)
    try:
        rows = msgspec.json.decode(page, type=list[_Instance])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--handoff: {proxy}/disagg/instances is not the answer of a vllm-disagg proxy: {error}"
        ) from None
    usable = {role: [row.url for row in rows if row.usable and row.role == role] for role in ROLES}
    for role in ROLES:
        if not usable[role]:
            raise ConfigError(f"--handoff: {proxy} can use no {role} instance now")
    for url in usable["decode"]:
        if "@" in url:
            raise ConfigError(
                f"--handoff: {url} is a data parallel rank, whose hand-offs are not apart from"
                " those of the others: give a proxy in front of others"
            )
    return usable["decode"]


def measure(
    proxy: str, decodes: list[str], model: ServedModel, longest: int, seconds: float
) -> MeasuredHandoff:
    """Sends prompts of up to `longest` tokens through the proxy, for so long and a few at least.

    Raises DisaggError if too few of them were handed over, or one has failed.
    """
    before = [_metrics(url) for url in decodes]
    started_at = time.monotonic()
    generator = random.Random()
    sent = 0
    while sent < LEAST_PROMPTS or time.monotonic() < started_at + seconds:
        length = round(LENGTH_SHARES[sent % len(LENGTH_SHARES)] * longest)
        prompt = generator.choices(PROBE_TOKEN_IDS, k=max(1, length))
        complete(proxy, model.id, [prompt], ANSWER_TOKENS)
        sent += 1
    lasted = time.monotonic() - started_at
    after = [_metrics(url) for url in decodes]
    windows = [MetricWindow(*pages, lasted) for pages in zip(before, after, strict=True)]
    sums = added(window.increases(HANDOFF_SUMS, "product") for window in windows)
    count = sums.get("handoffs*handoffs", 0.0)
    found = fit_handoffs(sums)
    if found is None or count < MIN_HANDOFFS:
        raise DisaggError(
            f"--handoff: decode instances loaded the KV of {count:.0f} of {sent} prompts, and"
            f" {MIN_HANDOFFS} are needed: the proxy sends such prompts whole (--min-prompt-bytes,"
            " --spill), or loads fail"
        )
    return found


def _metrics(url: str) -> MetricSamples:
    """Reads an engine's metrics."""
    return parse(http_client.get(url, "/metrics", "a vLLM"), url)
