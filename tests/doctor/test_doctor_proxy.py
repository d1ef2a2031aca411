"""`vllm-disagg doctor --proxy URL` before a real proxy with scripted instances, 2 of each role."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy_world import Call, World, until, world
from scripted_fleet import KEY_TEXT, DoctorEngine, report_on, run
from vllm_disagg.doctor import proxy_checks, server_client
from vllm_disagg.doctor.findings import Report, Status
from vllm_disagg.doctor.metrics_page import MetricsPage
from vllm_disagg.fleet.keys import ADMIN_KEY
from vllm_disagg.proxy.membership.members import SWEEP_SECONDS

KEY_NAMES = (ADMIN_KEY, "VLLM_API_KEY", "OPENAI_API_KEY")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEY_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "REQUEST_SECONDS", 20.0)


@contextlib.asynccontextmanager
async def proxy(plant: Callable[[World], object], **settings: Any) -> AsyncIterator[World]:
    """Runs a proxy whose instances have been probed with the planted fault."""

    def prepare(it: World) -> None:
        it.prefills[:] = [DoctorEngine(f"p{n}", "prefill") for n in range(2)]
        it.decodes[:] = [DoctorEngine(f"d{n}", "decode") for n in range(2)]
        prefilled = asyncio.Event()
        for engine in it.prefills + it.decodes:
            assert isinstance(engine, DoctorEngine)
            engine.prefilled = prefilled
        plant(it)

    async with world(ready=False, prepare=prepare, **settings) as it:

        async def is_probed() -> bool:
            return all(row["why_not"] != "not probed yet" for row in await it.instances())

        await until(is_probed)
        yield it


def examined(
    plant: Callable[[World], object] = lambda it: None, words: tuple[str, ...] = (), **settings: Any
) -> Report:
    async def examine() -> Report:
        async with proxy(plant, **settings) as it:
            return await report_on("--proxy", f"http://127.0.0.1:{it.port}", *words)

    return run(examine())


def troubles(report: Report) -> list[str]:
    """Returns the lines with trouble, without URLs behind the kind of the check."""
    found = []
    for finding in report.findings:
        if finding.status is not Status.OK:
            assert "; " in finding.text, "each line has what to do"
            found.append(f"{finding.status.name} {finding.name.split()[0]}: {finding.text}")
    return found


def test_a_healthy_fleet_has_no_finding() -> None:
    report = examined()
    assert troubles(report) == []
    lines = list(report.lines())
    assert "OK   readiness: 2 prefill and 2 decode instances" in lines
    (line,) = [line for line in lines if line.startswith("OK   prefill") and "p0" not in line][:1]
    assert "m, vLLM 0.32.0, disagg (tcp, zmq), pairs with 2, 0 in flight" in line


def test_with_the_fleet_key_each_pair_is_proved(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    path.write_text(KEY_TEXT)
    path.chmod(0o600)
    report = examined(words=("--key-file", str(path)))
    assert troubles(report) == []
    assert len([f for f in report.findings if "equal answers to 1,000 tokens" in f.text]) == 4


def p0(**fields: object) -> Callable[[World], object]:
    return lambda it: vars(it.prefills[0]).update(fields)


FAULTS: dict[str, tuple[Callable[[World], object], list[str]]] = {
    "a plain vLLM": (
        p0(plain=True),
        ["FAIL prefill: serves no KV transfers: it runs without this project's connector"],
    ),
    "an exchanged role": (
        p0(role="decode"),
        ["FAIL prefill: is given as --prefill, but its connector's role is decode"],
    ),
    "other weights": (
        p0(layout={"model": "m", "dtype": "bf16", "weights": "b4"}),
        ["FAIL pair: weights is b4 on one side and unknown on the other; serve the same files"] * 2,
    ),
    "failed loads fail requests": (
        p0(failure_policy="fail"),
        ['FAIL prefill: kv_load_failure_policy is "fail"'],
    ),
    "another version": (
        p0(version="0.31.0"),
        ["WARN pair: vLLM 0.31.0 at the prefill and 0.32.0 at the decode instance"] * 2,
    ),
    "an untested version": (
        p0(version="0.99"),
        ["WARN prefill: vLLM 0.99 is not among the tested versions", "WARN pair", "WARN pair"],
    ),
    "another name": (
        p0(models=["other"]),
        ["WARN pair: they serve one model as other and m; start both with the same"] * 2,
    ),
    "other transports": (
        p0(carriers=[]),
        ["WARN pair: transports zmq at P and tcp, zmq at D"] * 2,
    ),
    "a refused probe": (
        p0(probe_status=401),
        ["FAIL prefill: does not answer a probe: POST /v1/completions answered 401"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str) -> None:
    plant, expected = FAULTS[fault]
    found = troubles(examined(plant))
    assert len(found) == len(expected), found
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(beginning), found


def test_a_dead_instance_and_a_drained_one() -> None:
    async def examine() -> Report:
        async with proxy(lambda it: None, admin_key="root") as it:
            await it.prefills[0].stop()
            body = b'{"url": "%s"}' % it.prefills[1].url.encode()
            headers = {"content_type": "application/json", "authorization": "Bearer root"}
            reply = await it.ask("POST", "/disagg/instances/drain", body, **headers)
            assert reply.status == 200

            async def is_down() -> bool:
                return not (await it.instances())[0]["usable"]

            await until(is_down)
            return await report_on("--proxy", f"http://127.0.0.1:{it.port}")

    monkey = pytest.MonkeyPatch()
    monkey.setenv(ADMIN_KEY, "root")
    with monkey.context():
        found = troubles(run(examine()))
    monkey.undo()
    assert found[0].startswith("WARN readiness: no prefill instance can be used")
    assert "FAIL prefill: refuses connections" in found[1] and "; start it" in found[1]
    assert found[2].startswith("WARN prefill: it is drained; end the drain: POST ")


def test_the_only_prefill_instance_is_drained() -> None:
    """The remedy is to end the drain: another instance would not be missing."""

    async def examine() -> Report:
        async with proxy(lambda it: None, admin_key="root") as it:
            headers = {"content_type": "application/json", "authorization": "Bearer root"}
            for prefill in it.prefills:
                body = b'{"url": "%s"}' % prefill.url.encode()
                reply = await it.ask("POST", "/disagg/instances/drain", body, **headers)
                assert reply.status == 200
            await asyncio.sleep(2 * SWEEP_SECONDS)
            return await report_on("--proxy", f"http://127.0.0.1:{it.port}")

    with pytest.MonkeyPatch().context() as monkey:
        monkey.setenv(ADMIN_KEY, "root")
        found = troubles(run(examine()))
    assert found[0].startswith("WARN readiness: no prefill instance can be used")
    assert [line.partition(";")[0] for line in found[1:]] == ["WARN prefill: it is drained"] * 2
    assert all("; end the drain: " in line for line in found[1:])


@pytest.mark.parametrize(
    ("key", "expected"),
    [("", "its instances are shown to holders of a key; give"), ("no", "it refuses this key")],
)
def test_a_missing_and_a_wrong_key(key: str, expected: str, tmp_path: Path) -> None:
    words: tuple[str, ...] = ()
    if key:
        (tmp_path / "key").write_text(key)
        (tmp_path / "key").chmod(0o600)
        words = ("--admin-key-file", str(tmp_path / "key"))

    async def examine() -> Report:
        async with world(admin_key="root") as it:
            return await report_on("--proxy", f"http://127.0.0.1:{it.port}", *words)

    (line,) = troubles(run(examine()))
    assert line.startswith("FAIL proxy: ") and expected in line


def test_an_admin_key_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text("root")
    path.chmod(0o644)

    async def examine() -> Report:
        async with proxy(lambda it: None, admin_key="root") as it:
            words = ("--proxy", f"http://127.0.0.1:{it.port}", "--admin-key-file", str(path))
            return await report_on(*words)

    (line,) = troubles(run(examine()))
    assert line.startswith(f"WARN admin: {path}: other users of this machine may read")
    assert f"(mode 0644); chmod 600 {path}" in line


async def _as_nginx(call: Call) -> None:
    await call.json({}, headers="server: nginx\r\n")


async def report_on_server(answer: Callable[[Call], Awaitable[None]] | None) -> Report:
    """Reports on a server that answers any path so; None: an engine."""
    engine = DoctorEngine("d", "decode")
    if answer:
        vars(engine)["_route"] = answer
    await engine.start()
    try:
        return await report_on("--proxy", engine.url)
    finally:
        await engine.stop()


@pytest.mark.parametrize("is_router", [False, True])
def test_servers_that_are_no_proxy(is_router: bool) -> None:
    found = troubles(run(report_on_server(_as_nginx if is_router else None)))
    if is_router:
        assert found[0].startswith("WARN proxy: a router is in front of it (server: nginx); its")
    else:
        assert "GET /disagg/instances answered 404: no vllm-disagg proxy; give its URL" in found[0]


@pytest.mark.parametrize(
    ("status", "server", "expected"),
    [
        (404, "SimpleHTTP/0.6", "answered 404 (server: SimpleHTTP/0.6): no vllm-disagg proxy;"),
        (404, "", "answered 404: no vllm-disagg proxy; give its URL"),
        (502, "nginx", "answered 502 (server: nginx): the router reaches no proxy; start the"),
    ],
)
def test_other_servers_are_no_routers_in_front(status: int, server: str, expected: str) -> None:
    async def answer(call: Call) -> None:
        await call.json({}, status=status, headers=f"server: {server}\r\n" if server else "")

    (line,) = troubles(run(report_on_server(answer)))
    assert line.startswith(f"FAIL proxy: GET /health {expected}")


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (b"<html>Welcome</html>", "GET /disagg/instances answered 200: no vllm-disagg proxy; give"),
        (b"{}", "GET /disagg/instances answered 200: no vllm-disagg proxy; give its URL"),
        (b"[" * 100_000, "GET /disagg/instances answered 200: no vllm-disagg proxy; give its URL"),
        (b'[{"url": 1}]', "its list of instances is of another version of vllm-disagg; use the"),
    ],
)
def test_a_server_that_answers_any_path(page: bytes, expected: str) -> None:
    async def answer(call: Call) -> None:
        call.raw_write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n{page.decode()}")
        await call.writer.drain()

    line, *_ = troubles(run(report_on_server(answer)))
    assert line.startswith(f"FAIL proxy: {expected}")


def test_no_proxy_at_all() -> None:
    (line,) = troubles(run(report_on("--proxy", "http://127.0.0.1:9")))
    assert line.startswith("FAIL proxy: GET /health: Connection refused; start it")


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (
            'requests_total{outcome="timeout"} 3',
            "3 requests were ended by --request-timeout; raise",
        ),
        ('fallbacks_total{reason="prefill_timeout"} 2', "2 prompts were not computed within"),
        ('requests_total{outcome="cancelled"} 40', "the other side left before the end of 40 of"),
        ('requests_total{outcome="cancelled"} 9', ""),
    ],
)
def test_timeouts_that_cut_answers(series: str, expected: str) -> None:
    report = Report()
    text = f'vllm_disagg_requests_total{{outcome="ok"}} 100\nvllm_disagg_{series}\n'
    proxy_checks.examine_metrics(report, MetricsPage(text.encode()))
    (finding,) = report.findings
    assert (finding.status is Status.WARN) == bool(expected) and expected in finding.text
