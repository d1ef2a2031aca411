"""Proves a pair: a prompt through it gives the answer of the decode instance alone.

    reference   D computes the prompt itself, under a cache salt
    transfer    both legs under another salt: no cache has the prompt, so D loads P's KV
    reuse       both legs under the reference's salt: only D has it, so P reads KV back

A salt keeps vLLM's prefix caches apart, and is new in each run. Figures come from the engines' own
metrics: traffic of others in the same seconds adds to them.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from ..fleet.grants import REQUEST_KEY
from ..fleet.keys import FleetKey
from ..proxy.membership.engine_answers import NIXL_PREFILL, params_in, report_in
from ..proxy.requests.legs import mint_grants
from ..proxy.routing.pairing import InstancePair
from ..proxy.routing.policies import RoutingQuery
from . import remedies
from .findings import Report
from .instance_checks import CONNECTOR_SERIES, FAILED_LOADS, PROMPT_TOKENS, ExaminedInstance
from .metrics_page import MetricsPage
from .pair_checks import pair_name
from .server_client import NoAnswer, ServerAnswer

COMPLETIONS = "/v1/completions"
ANSWER_TOKENS = 8
REQUEST_SECONDS = 60.0  # of one request; a cold engine may compile
PATIENCE_SECONDS = 20.0  # of a leg without progress
METRICS_SECONDS = 3.0  # until an engine's metrics show a transfer
METRICS_NUDGES = 6  # steps caused in that time: NIXL's figures come with a later step
METRICS_POLL_SECONDS = 0.05
REUSED = "vllm:disagg_reused_bytes_total"
NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"
NIXL_FAILURES = "vllm:nixl_num_failed_transfers_total"


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _GeneratedCompletion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True)
class GeneratedAnswer:
    """The generated part of an answer, by which two are compared."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PairFigures:
    """Figures of one transfer."""

    prefill: str
    decode: str
    prompt_tokens: int
    seconds: float  # of the request with the pair
    seconds_alone: float  # of the decode instance alone
    kv_bytes: int
    transports: list[str]  # empty with NixlConnector, which does not state them
    early_share: float | None  # of the bytes, before the prefill was complete
    load_seconds: float
    reused_bytes: int  # read back by the prefill instance

    def text(self) -> str:
        """Formats the figures for people."""
        by = ", ".join(self.transports) or "UCX (stock vLLM does not state the transport)"
        parts = [f"{self.kv_bytes:,} bytes of KV by {by} in {self.load_seconds * 1000:.0f} ms"]
        if self.early_share is not None:
            parts.append(f"{self.early_share:.0%} of them during the prefill")
        parts.append(f"{self.seconds * 1000:.0f} ms with the pair")
        parts.append(f"{self.seconds_alone * 1000:.0f} ms at D alone")
        if self.reused_bytes:
            parts.append(f"P read {self.reused_bytes:,} bytes back")
        return f"equal answers to {self.prompt_tokens:,} tokens; {', '.join(parts)}"

    def document(self) -> dict[str, Any]:
        """Returns the figures for programs."""
        return asdict(self)


class _Unproved(Exception):
    """A pair without a proof: the problem, and what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True)
class Reference:
    """The answer of a decode instance alone, and the salt under which it has cached the prompt."""

    salt: str
    answer: GeneratedAnswer
    seconds: float


async def make_reference(decode: ExaminedInstance, report: Report) -> Reference | None:
    """Returns the answer of D alone; None, and a finding, without one."""
    salt = secrets.token_hex(8)
    try:
        answer = await decode.client.post(COMPLETIONS, _body(decode, salt), REQUEST_SECONDS)
        return Reference(salt, _generated("D alone", answer), answer.seconds)
    except NoAnswer as error:
        report.fail(decode.name, f"alone: {error}", remedies.RESTART)
    except _Unproved as error:
        report.fail(decode.name, str(error), error.remedy)
    return None


class PairProof:
    """The proof of one pair."""

    def __init__(
        self, prefill: ExaminedInstance, decode: ExaminedInstance, key: FleetKey, report: Report
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._key = key
        self._report = report
        self._name = pair_name(prefill, decode)

    async def run(self, reference: Reference) -> PairFigures | None:
        """Adds the result, and returns the figures if the pair is proved."""
        try:
            return await self._prove(reference)
        except NoAnswer as error:
            self._report.fail(self._name, str(error), remedies.RESTART)
        except _Unproved as error:
            self._report.fail(self._name, str(error), error.remedy)
        except ValueError:
            self._report.fail(self._name, "/metrics is no Prometheus text", remedies.RESTART)
        return None

    async def _prove(self, reference: Reference) -> PairFigures:
        before = await self._page(self._decode)
        answer = await self._request(secrets.token_hex(8), with_reuse=False)
        generated = _generated("the pair", answer)
        after = await self._page_with_transfer(before)
        self._check_transfer(before, after)
        await self._compare(generated, reference, "the pair")
        reused = await self._reuse(reference)
        figures = self._figures(before, after, answer.seconds, reference.seconds, reused)
        self._report.ok(self._name, figures.text())
        return figures

    # Requests -------------------------------------------------------------------------------------
    async def _request(self, salt: str, *, with_reuse: bool) -> ServerAnswer:
        """Runs a request with the pair; returns D's answer."""
        if self._prefill.instance.connector == "nixl":
            return await self._run_in_turn(salt)
        loop = asyncio.get_running_loop()
        pair = InstancePair(
            self._prefill.instance, self._decode.instance, RoutingQuery(0), with_reuse
        )
        grants = mint_grants(self._key, pair, PATIENCE_SECONDS, loop.time())
        body = {**_body(self._prefill, salt, grants[0]), "max_tokens": 1}
        prefill = loop.create_task(self._prefill.client.post(COMPLETIONS, body, REQUEST_SECONDS))
        body = _body(self._decode, salt, grants[1])
        decode = loop.create_task(self._decode.client.post(COMPLETIONS, body, REQUEST_SECONDS))
        try:
            self._check_prefill(await prefill)
            return await decode
        finally:
            decode.cancel()
            await asyncio.gather(decode, return_exceptions=True)

    def _check_prefill(self, answer: ServerAnswer) -> None:
        _check_status("P", answer)
        found = report_in(answer.body)
        if found is None or not found.workers:
            raise _Unproved(
                "P refuses its grant", 'its log has the reason: look for "grant refused"'
            )

    async def _run_in_turn(self, salt: str) -> ServerAnswer:
        """Runs NixlConnector's two legs."""
        body = {**_body(self._prefill, salt), "max_tokens": 1, "kv_transfer_params": NIXL_PREFILL}
        answer = await self._prefill.client.post(COMPLETIONS, body, REQUEST_SECONDS)
        _check_status("P", answer)
        params = params_in(answer.body)
        if params is None:
            raise _Unproved("P's answer names no KV", "set kv_role kv_producer or kv_both at P")
        body = {**_body(self._decode, salt), "kv_transfer_params": params}
        decoded = await self._decode.client.post(COMPLETIONS, body, REQUEST_SECONDS)
        seconds = answer.seconds + decoded.seconds
        return ServerAnswer(decoded.status, decoded.headers, decoded.body, seconds)

    # Judgement ------------------------------------------------------------------------------------
    async def _page(self, examined: ExaminedInstance) -> MetricsPage:
        answer = await examined.client.get("/metrics")
        return MetricsPage(answer.body)

    async def _page_with_transfer(self, before: MetricsPage) -> MetricsPage:
        """Returns D's metrics once they show a transfer or a failed one."""
        series = [CONNECTOR_SERIES, FAILED_LOADS]
        if self._prefill.instance.connector == "nixl":
            series = [NIXL_BYTES, NIXL_FAILURES]
        return await self._page_after(self._decode, before, series)

    async def _page_after(
        self, examined: ExaminedInstance, before: MetricsPage, series: list[str]
    ) -> MetricsPage:
        """Returns the first page on which one of the series has grown, or the last one."""
        loop = asyncio.get_running_loop()
        interval = METRICS_SECONDS / METRICS_NUDGES
        next_nudge = loop.time() + interval
        deadline = loop.time() + METRICS_SECONDS
        while True:
            page = await self._page(examined)
            if any(page.total(name) > before.total(name) for name in series):
                return page
            if loop.time() > deadline:
                return page
            if loop.time() > next_nudge:
                next_nudge += interval
                body = {"model": examined.instance.model, "prompt": "probe", "max_tokens": 1}
                await examined.client.post(COMPLETIONS, body, REQUEST_SECONDS)
            await asyncio.sleep(METRICS_POLL_SECONDS)

    def _check_transfer(self, before: MetricsPage, after: MetricsPage) -> None:
        """Raises _Unproved unless KV has arrived at D."""
        if self._prefill.instance.connector == "nixl":
            if after.total(NIXL_FAILURES) > before.total(NIXL_FAILURES):
                raise _Unproved("NIXL's transfer has failed", "read D's log")
            if after.total(NIXL_BYTES) <= before.total(NIXL_BYTES):
                raise _Unproved(
                    "D's metrics show no KV by NIXL",
                    "set kv_role kv_consumer or kv_both at D; start without --disable-log-stats",
                )
            return
        failed = after.by_label(FAILED_LOADS, "reason")
        failed_before = before.by_label(FAILED_LOADS, "reason")
        for reason, count in failed.items():
            if count > failed_before.get(reason, 0.0):
                raise _Unproved(
                    f"the KV did not arrive ({reason}), and D computed the prompt",
                    remedies.of_load(reason),
                )
        if not after.has(CONNECTOR_SERIES):
            raise _Unproved(
                "D's metrics show no transfers", "start engines without --disable-log-stats"
            )
        if after.total(CONNECTOR_SERIES) <= before.total(CONNECTOR_SERIES):
            raise _Unproved(
                "no KV was transferred, and D computed the prompt",
                'D\'s log has the reason: look for "grant refused" or "without a KV transfer"',
            )

    async def _compare(self, generated: GeneratedAnswer, reference: Reference, by: str) -> None:
        """Raises _Unproved if an answer is not that of D alone, which must repeat itself."""
        if generated == reference.answer:
            return
        body = _body(self._decode, secrets.token_hex(8))
        again = await self._decode.client.post(COMPLETIONS, body, REQUEST_SECONDS)
        if _generated("D alone", again) != reference.answer:
            raise _Unproved(
                "D alone gives two answers to one prompt, so nothing can be compared",
                "repeat without other traffic, or set VLLM_BATCH_INVARIANT=1 on all engines",
            )
        raise _Unproved(
            f"the answer of {by} is not that of D alone",
            "do not use this pair, and report it with this output and the logs of both",
        )

    async def _reuse(self, reference: Reference) -> int:
        """Returns how many bytes P has read back; adds a finding if it could not."""
        instances = (self._prefill.instance, self._decode.instance)
        if not all(instance.bidirectional for instance in instances):
            return 0
        before = await self._page(self._prefill)
        answer = await self._request(reference.salt, with_reuse=True)
        await self._compare(_generated("the pair", answer), reference, "the pair with reuse")
        after = await self._page_after(self._prefill, before, [REUSED, FAILED_LOADS])
        size = int(after.total(REUSED) - before.total(REUSED))
        if not size:
            self._report.warn(
                self._name,
                "P read no KV back from D, so later turns compute their whole prompts",
                "open D's control and data ports for P's machine",
            )
        return size

    def _figures(
        self,
        before: MetricsPage,
        after: MetricsPage,
        seconds: float,
        seconds_alone: float,
        reused: int,
    ) -> PairFigures:
        is_nixl = self._prefill.instance.connector == "nixl"

        def increase(name: str) -> float:
            return after.total(name) - before.total(name)

        received = increase(NIXL_BYTES if is_nixl else CONNECTOR_SERIES)
        wire = "vllm:disagg_received_wire_bytes_total"
        old = before.by_label(wire, "transport")
        new = after.by_label(wire, "transport")
        load = "vllm:nixl_xfer_time_seconds_sum" if is_nixl else "vllm:disagg_load_seconds_sum"
        early = increase("vllm:disagg_overlapped_bytes_total") / received
        return PairFigures(
            prefill=self._prefill.instance.url,
            decode=self._decode.instance.url,
            prompt_tokens=len(_prompt(self._decode)),
            seconds=round(seconds, 3),
            seconds_alone=round(seconds_alone, 3),
            kv_bytes=int(received),
            transports=[name for name, size in new.items() if size > old.get(name, 0.0)],
            early_share=None if is_nixl else early,
            load_seconds=round(increase(load), 6),
            reused_bytes=reused,
        )


def _prompt(examined: ExaminedInstance) -> list[int]:
    """Returns a prompt that, with its answer, the model's context holds."""
    room = PROMPT_TOKENS
    if examined.max_model_tokens:
        room = max(1, min(room, examined.max_model_tokens - ANSWER_TOKENS))
    return list(examined.tokens[:room])


def _body(examined: ExaminedInstance, salt: str, grant: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": examined.instance.model,
        "prompt": _prompt(examined),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    if grant:
        body["kv_transfer_params"] = {REQUEST_KEY: grant}
    return body


def _check_status(who: str, answer: ServerAnswer) -> None:
    """Raises _Unproved for an answer without a generated text. Bodies are not shown."""
    if answer.status == 200:
        return
    if answer.status in (429, 503):
        raise _Unproved(f"{who} takes no request now ({answer.status})", "repeat with less load")
    raise _Unproved(f"{who} answered {answer.status} to the prompt", "its log has the reason")


def _generated(who: str, answer: ServerAnswer) -> GeneratedAnswer:
    """Returns what an answer has generated. Raises _Unproved."""
    _check_status(who, answer)
    try:
        choice = msgspec.json.decode(answer.body, type=_GeneratedCompletion).choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        raise _Unproved(f"the answer of {who} is no completion", remedies.RESTART) from None
    return GeneratedAnswer(choice.text, tuple(choice.token_ids or ()))
