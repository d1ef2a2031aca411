"""Compares the proxy's figures with the actions of scripted engines."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from proxy_world import Call, answer_at_once, settle, until, world
from vllm_disagg import __version__
from vllm_disagg.proxy.requests.failover import FALLBACK_REASONS
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.telemetry import metrics as metrics_module
from vllm_disagg.proxy.telemetry.merged_metrics import merge
from vllm_disagg.proxy.telemetry.meter import HistogramBuckets, TrafficCounters
from vllm_disagg.proxy.telemetry.metrics import OUTCOMES, LatencyObjectives, Metrics

USAGE = {
    "prompt_tokens": 7,
    "total_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 2},
}
STEP = 0.05


class Paced:
    """Takes 2 steps for the prefill, one for the hand-off, and one for each token."""

    def __init__(self) -> None:
        self._prefilled = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        if call.leg == "prefill":
            await asyncio.sleep(2 * STEP)
            await answer_at_once(call)
            await settle()
            self._prefilled.set()
            return
        await call.stream()
        await self._prefilled.wait()
        await asyncio.sleep(STEP)
        for word in ("a", "b", "c"):
            await call.event({"text": word})
            await settle()
            await asyncio.sleep(STEP)
        await call.event({"choices": [], "usage": USAGE})
        await call.event("[DONE]")
        await call.end()


async def test_a_streams_times_and_tokens() -> None:
    async with world(objectives=LatencyObjectives(ttft=60.0, tpot=STEP / 10)) as w:
        w.p.script = w.d.script = Paced()
        await w.post(stream=True)

        async def seconds(name: str) -> float:
            return await w.metric(f"vllm_disagg_{name}_seconds_sum")

        assert await w.metric("vllm_disagg_ttft_seconds_count") == 1
        took = {
            name: await seconds(name)
            for name in ("ttft", "prefill_leg", "handoff", "first_decode_step", "tpot", "e2e")
        }
        least = {
            "ttft": 3,
            "prefill_leg": 2,
            "handoff": 0.5,
            "first_decode_step": 1,
            "tpot": 1.5,
            "e2e": 6,
        }
        assert {name: took[name] for name in least if took[name] < 0.9 * STEP * least[name]} == {}
        assert took["prefill_leg"] + took["handoff"] <= took["ttft"] + 0.01, (
            "phases are parts of the whole"
        )
        assert took["ttft"] + 2 * took["tpot"] <= took["e2e"] + 0.01
        assert await w.metric("vllm_disagg_itl_seconds_count") in (
            3,
            4,
        )  # usage and [DONE] came together, or not quite
        for kind, tokens in (("prompt", 7), ("completion", 3), ("cached", 2)):
            assert await w.metric("vllm_disagg_tokens_total", f'"{kind}"') == tokens
        assert await w.metric("vllm_disagg_pair_requests_total", w.p.url, w.d.url) == 1
        assert await w.metric("vllm_disagg_pair_seconds_total", 'phase="prefill"') == pytest.approx(
            took["prefill_leg"]
        )
        assert await w.metric("vllm_disagg_goodput_total") == 0
        assert await w.metric("vllm_disagg_missed_total", 'objective="tpot"') == 1
        assert await w.metric("vllm_disagg_missed_total", 'objective="ttft"') == 0
        assert await w.metric("vllm_disagg_bytes_total", "sent") > 200


async def test_series_with_few_known_labels_start_at_zero() -> None:
    async with world() as w:
        text = (await w.get("/metrics")).body.decode()
    found = {line for line in text.splitlines() if line.endswith(" 0.0")}
    for name, values in {
        'fallbacks_total{reason="': FALLBACK_REASONS,
        'failovers_total{rung="': ("pair", "same_decode", "other_decode", "none"),
        'tokens_total{kind="': ("prompt", "completion", "cached"),
        'events_total{direction="': ("sent",),
        'bytes_total{direction="': ("received", "sent"),
        'missed_total{objective="': ("ttft", "tpot"),
        'waiting{place="': ("work", "prefill", "decode"),
    }.items():
        for value in values:
            assert f'vllm_disagg_{name}{value}"}} 0.0' in found
    for outcome in OUTCOMES:
        labels = f'mode="disaggregated",outcome="{outcome}",path="/v1/completions"'
        assert f"vllm_disagg_requests_total{{{labels}}} 0.0" in found
    assert {"no_pair", "prefill_full", "prefill_5xx", "decode_failed"} < set(FALLBACK_REASONS)


async def test_whole_answers_have_no_first_token() -> None:
    async with world(prefill=0) as w:

        async def reply(call: Call) -> None:
            choices = [{"text": '"usage":{"prompt_tokens":99}'}]
            await call.json(
                {"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
            )

        w.d.script = reply
        await w.post()
        assert await w.metric("vllm_disagg_ttft_seconds_count") == 0
        assert await w.metric("vllm_disagg_e2e_seconds_count") == 1
        assert await w.metric("vllm_disagg_tokens_total", '"prompt"') == 5
        assert await w.metric("vllm_disagg_goodput_total") == 1


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'data: {"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}\n\n', {}),
        (b'data: {"usage":null}\n\ndata: [DONE]\n\n', {}),
        (
            b'data: {"usage":{"input_tokens": 4,"output_tokens": 5}}\n\n',
            {"prompt": 4, "completion": 5},
        ),
    ],
)
def test_usage(tail: bytes, usage: dict[str, int]) -> None:
    meter = TrafficCounters(HistogramBuckets((1.0,)))
    meter.wrote(b"data: {}\n\n")
    meter.wrote(tail)
    assert meter.usage() == usage


def test_comments_are_no_tokens() -> None:
    meter = TrafficCounters(HistogramBuckets((1.0,)))
    meter.wrote(b": keep-alive\n\n")
    assert meter.ttft is None and meter.events == 0 and meter.sent == 14


def test_buckets() -> None:
    buckets = HistogramBuckets((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        buckets.observe(value, times)
    assert buckets.counts == [3, 1, 1] and buckets.sum == 13.0


async def test_the_access_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with world(access_log=str(path)) as w:
        w.p.script = w.d.script = Paced()
        body = json.dumps({"model": "m", "prompt": "hi", "stream": True}).encode()
        await w.ask("POST", "/v1/completions", body, x_request_id="r1")
        await w.post(_body=b"{")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    expected = {
        "id": "r1",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "mode": "disaggregated",
        "outcome": "ok",
        "prefill": w.p.url,
        "decode": w.d.url,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "bytes_in": len(body),
        "events": 5,
    }
    assert {name: first[name] for name in expected} == expected
    assert first["ttft_seconds"] >= first["prefill_seconds"] >= 1.9 * STEP
    assert (second["status"], second["outcome"]) == (400, "client_error")


async def test_no_figure_of_those_who_left() -> None:
    async with world(prefill=0) as w:

        async def endless(call: Call) -> None:
            await call.stream()
            await call.event("a")
            await call.forever()

        w.d.script = endless
        client = await w.start(stream=True)
        await until(lambda: w.d.calls)
        await client.reader.readuntil(b"data: a\n\n")
        client.close()
        await until(lambda: _cancelled(w))
        assert (
            await w.metric("vllm_disagg_e2e_seconds_count") == 0
            and await w.metric("vllm_disagg_goodput_total") == 0
        )


async def _cancelled(w: Any) -> bool:
    return bool(await w.metric("vllm_disagg_requests_total", "cancelled") == 1)


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_trace_context_goes_to_both_legs_as_it_is() -> None:
    async with world() as w:
        await w.ask(
            "POST",
            "/v1/completions",
            b'{"model":"m","prompt":"hi"}',
            traceparent=PARENT,
            tracestate="a=b",
        )
        for engine in (w.p, w.d):
            assert (
                engine.calls[0].headers["traceparent"] == PARENT
                and engine.calls[0].headers["tracestate"] == "a=b"
            )


async def test_spans() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[bytes] = []

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                received.append(
                    await reader.readexactly(
                        int(head.partition("content-length: ")[2].partition("\r")[0])
                    )
                )
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    async with world(traces_endpoint=f"http://127.0.0.1:{port}/v1/traces") as w:
        await w.ask(
            "POST",
            "/v1/completions",
            b'{"model":"m","prompt":"hi","stream":true}',
            traceparent=PARENT,
        )
        given = {
            leg: engine.calls[0].headers["traceparent"]
            for leg, engine in (("prefill", w.p), ("decode", w.d))
        }
    import gzip

    message = ExportTraceServiceRequest()
    message.ParseFromString(
        gzip.decompress(received[0]) if received[0][:2] == b"\x1f\x8b" else received[0]
    )
    spans = {span.name: span for span in message.resource_spans[0].scope_spans[0].spans}
    root = spans["POST /v1/completions"]
    assert root.trace_id.hex() == PARENT[3:35] and root.parent_span_id.hex() == PARENT[36:52]
    for leg in ("prefill", "decode"):
        assert spans[leg].parent_span_id == root.span_id
        assert given[leg] == f"00-{PARENT[3:35]}-{spans[leg].span_id.hex()}-01"
    assert {a.key: a.value.string_value for a in root.attributes}["mode"] == "disaggregated"
    collector.close()


async def test_only_generation_counts_in_goodput_and_e2e() -> None:
    async with world() as w:
        for _ in range(3):
            assert (await w.post()).status == 200
            assert (await w.post("/tokenize")).status == 200
            assert (await w.get("/v1/models")).status == 200
        assert await w.metric("vllm_disagg_goodput_total") == 3
        assert await w.metric("vllm_disagg_e2e_seconds_count") == 3
        assert await w.metric("vllm_disagg_requests_total", 'mode="passthrough"') == 6


async def test_phases_are_of_one_clock(tmp_path: Path) -> None:
    """uvloop's clock has steps of a millisecond: phases of it exceeded the whole."""
    path = tmp_path / "access.log"
    async with world(access_log=str(path)) as w:
        for _ in range(20):
            assert (await w.post()).status == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 20
    for line in lines:
        assert line["queue_seconds"] + line["prefill_seconds"] <= line["seconds"]
    queued = [line["queue_seconds"] for line in lines]
    assert any(value * 1000 % 1 for value in queued), queued


async def test_the_series_of_generation_exist_before_the_first_request() -> None:
    async with world() as w:
        before = await _request_series(w)
        assert (await w.post()).status == 200
        assert (await w.post(_body=b"no JSON")).status == 400
        assert await _request_series(w) == before


async def _request_series(w: Any) -> set[str]:
    text = (await w.get("/metrics")).body.decode()
    lines = (line.rpartition(" ")[0] for line in text.splitlines())
    return {line for line in lines if line.startswith("vllm_disagg_requests_total")}


async def test_process_and_build_are_described() -> None:
    async with world() as w:
        assert await w.metric("vllm_disagg_build_info{", f'version="{__version__}"') == 1
        assert await w.metric("process_start_time_seconds") > 1e9
        assert 0 < await w.metric("process_open_fds") < await w.metric("process_max_fds")


def test_memory_and_files_of_proxy_workers_are_added() -> None:
    page = """# TYPE process_open_fds gauge
process_open_fds 7
# TYPE process_start_time_seconds gauge
process_start_time_seconds 5
"""
    merged = merge([page, page]).decode()
    assert "process_open_fds 14.0" in merged
    assert "process_start_time_seconds 5.0" in merged


def test_pairs_that_have_left_are_forgotten_without_a_scrape() -> None:
    """A fleet in Kubernetes has other addresses after each roll-out."""
    fleet = Fleet([Instance("http://p", "prefill"), Instance("http://d", "decode")])
    metrics = Metrics(fleet)
    for prefill in ("http://p", "http://left"):
        meter = metrics.meter()
        meter.paired(prefill, "http://d")
        metrics.ended("/v1/completions", "disaggregated", "ok", meter, received=8)
    metrics.decay_pair_weights()
    assert metrics.pair_weights() == {("http://p", "http://d"): 4}


def test_the_series_of_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of 500 and 500 has 250,000 pairs: a page of 80 MB, rendered in 6 s."""
    monkeypatch.setattr(metrics_module, "MAX_PAIRS", 2)
    urls = [f"http://d{number}" for number in range(4)]
    fleet = Fleet([Instance("http://p", "prefill"), *(Instance(url, "decode") for url in urls)])
    metrics = Metrics(fleet)

    def serve(decode: str, received: int) -> None:
        meter = metrics.meter()
        meter.paired("http://p", decode)
        metrics.ended("/v1/completions", "disaggregated", "ok", meter, received=received)

    def served() -> dict[str, float]:
        name = "vllm_disagg_pair_requests_total"
        lines = metrics.render().decode().splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}

    for number, url in enumerate(urls):
        serve(url, 10 + number)
        serve(url, 10)
    assert served() == {urls[0]: 2, urls[1]: 2, "other": 4}
    metrics.decay_pair_weights()
    assert metrics.pair_weights() == {("http://p", urls[2]): 11, ("http://p", urls[3]): 11}
    serve(urls[0], 500)
    serve(urls[3], 500)
    assert served() == {urls[0]: 3, urls[1]: 2, "other": 5}, "no series ever falls"
    fleet.instances.pop(1)
    assert served() == {urls[1]: 2, "other": 5}
