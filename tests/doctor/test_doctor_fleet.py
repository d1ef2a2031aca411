"""`vllm-disagg doctor --prefill URL --decode URL` names planted faults, and no others.

2 prefill and 2 decode instances, scripted; their pairs run real requests of the doctor.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import proxy_world
from scripted_fleet import KEY_TEXT, KV_BYTES, ScriptedFleet, report_on, run, running
from vllm_disagg import cli
from vllm_disagg.doctor import instance_checks, pair_proof, server_client
from vllm_disagg.doctor.findings import Status
from vllm_disagg.doctor.fleet_checks import FleetReport
from vllm_disagg.doctor.metrics_page import MetricsPage
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.protocol.peers import WorkerInfo

Plant = Callable[[ScriptedFleet], object]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    # Long, so that a slow machine is no fault; `FROZEN` has those that wait for the end of it.
    monkeypatch.setattr(server_client, "REQUEST_SECONDS", 20.0)
    monkeypatch.setattr(instance_checks, "PROBE_SECONDS", 20.0)
    monkeypatch.setattr(instance_checks, "CONNECT_SECONDS", 0.1)  # no such network here
    monkeypatch.setattr(pair_proof, "METRICS_SECONDS", 0.1)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "fleet.key"
    path.write_text(KEY_TEXT)
    path.chmod(0o600)
    return str(path)


def examined(plant: Plant, key_file: str) -> FleetReport:
    async def examine() -> FleetReport:
        async with running() as fleet:
            plant(fleet)
            flags = ["--key-file", key_file] if key_file else []
            return await report_on(*fleet.flags(), *flags)

    return run(examine())


def troubles(report: FleetReport) -> list[str]:
    return [found.line() for found in report.findings if found.status is not Status.OK]


def test_a_healthy_fleet_has_no_finding(key_file: str) -> None:
    began = time.monotonic()
    report = examined(lambda fleet: None, key_file)
    assert troubles(report) == []
    assert time.monotonic() - began < 10
    assert [(pair.kv_bytes, pair.transports, pair.early_share) for pair in report.pairs] == [
        (KV_BYTES, ["tcp"], 0.75)
    ] * 4
    assert all(pair.prompt_tokens == 1000 and pair.reused_bytes for pair in report.pairs)
    lines = list(report.lines())
    assert any("equal answers to 1,000 tokens" in line and "by tcp" in line for line in lines)


def all_engines(**fields: object) -> Plant:
    def plant(fleet: ScriptedFleet) -> None:
        for engine in fleet.engines:
            vars(engine).update(fields)

    return plant


def of_p(**fields: object) -> Plant:
    return lambda fleet: vars(fleet.p).update(fields)


def of_d(**fields: object) -> Plant:
    return lambda fleet: vars(fleet.d).update(fields)


def at_p(**facts: str) -> Plant:
    return lambda fleet: fleet.p.layout.update({n.replace("_", " "): t for n, t in facts.items()})


def dead(fleet: ScriptedFleet) -> None:
    assert fleet.d._server
    fleet.d._server.close()


def behind_a_balancer(fleet: ScriptedFleet) -> None:
    """Each probe's answer comes from another process."""
    facts = fleet.p.facts

    def take_turns(rank: int | None = None) -> dict[str, object]:
        fleet.p.turn += 1
        fleet.p.incarnation = f"process {fleet.p.turn}"
        return facts(rank)

    vars(fleet.p)["facts"] = take_turns


def swapped(fleet: ScriptedFleet) -> None:
    fleet.p, fleet.d = fleet.d, fleet.p


# By fault: what breaks, the beginning of each line (without a URL), and parts that say what to do.
FAULTS: dict[str, tuple[Plant, list[str]]] = {
    "a dead instance": (dead, ["FAIL decode: GET /health: Connection refused; start it"]),
    "a dead engine core": (of_p(health=503), ["FAIL prefill: GET /health answered 503"]),
    "another server": (
        of_p(health=404, server_field="SimpleHTTP/0.6 Python/3.12"),
        [
            "FAIL prefill: GET /health answered 404 (server: SimpleHTTP/0.6 Python/3.12): no vLLM;"
            " give an engine's own URL"
        ],
    ),
    "a router without an engine": (
        of_p(health=502, server_field="nginx"),
        [
            "FAIL prefill: GET /health answered 502 (server: nginx): the router reaches no engine;"
            " give an engine's own URL"
        ],
    ),
    "a key that is not given": (
        of_d(api_key="secret"),
        ["FAIL decode: GET /v1/models answered 401: it needs a key, or another one; put its"],
    ),
    "an old vLLM": (
        of_p(version="0.20.0"),
        ["FAIL prefill: vLLM 0.20.0 is too old; install 0.28", "WARN pair: vLLM", "WARN pair"],
    ),
    "another vLLM": (
        of_d(version="0.31.0"),
        ["WARN pair: vLLM 0.32.0 at the prefill and 0.31.0 at the decode instance", "WARN pair"],
    ),
    "a plain vLLM": (
        of_d(plain=True, has_metrics=False),
        ["FAIL decode: its vLLM runs without DisaggConnector; give it DisaggConnector"],
    ),
    "another fleet key": (
        of_d(plain=True),
        ["FAIL decode: its DisaggConnector refuses the key"],
    ),
    "exchanged roles": (
        swapped,
        [
            "FAIL prefill: is given as --prefill, but its connector's role is decode; exchange",
            "FAIL decode: is given as --decode, but its connector's role is prefill; exchange",
        ],
    ),
    "a load balancer over engines": (
        behind_a_balancer,
        ["FAIL prefill: two requests reached two processes; give each engine's own URL"],
    ),
    "a router in front": (
        of_p(server_field="nginx"),
        ["WARN prefill: a router is in front of it (server: nginx); give the engine's own URL"],
    ),
    "failed loads fail requests": (
        of_d(failure_policy="fail"),
        ['FAIL decode: kv_load_failure_policy is "fail": a failed transfer fails the request; set'],
    ),
    "a closed control port": (
        lambda fleet: fleet.p.close_port(0),
        ["FAIL prefill: its control port tcp://127.0.0.1:"],
    ),
    "a closed data port": (
        lambda fleet: fleet.p.close_port(1),
        ["FAIL prefill: its data port tcp://127.0.0.1:"],
    ),
    "P on the loopback of another machine": (
        of_p(host="another machine"),
        ["FAIL pair: P's workers are on the loopback, and D runs on another machine; set host"] * 2,
    ),
    "another release, which made another fact": (
        lambda fleet: (at_p(weights="b4")(fleet), of_p(release="0.2.0")(fleet)),
        [
            "FAIL pair: weights is b4 at P and unknown at D; vllm-disagg 0.2.0 on one side and"
            " unknown on the other; serve"
        ]
        * 2,
    ),
    "other weights and dtype": (
        at_p(weights="b4", dtype="fp16"),
        [
            "FAIL pair: dtype is fp16 at P and bf16 at D; start both",
            "FAIL pair: weights is b4 at P and unknown at D; serve the same files",
        ]
        * 2,
    ),
    "other tokens": (
        of_d(tokens_added=1),
        ["FAIL pair: the two make different tokens of one text; serve the same tokenizer"] * 2,
    ),
    "other transports": (
        of_p(carriers=[]),
        ["WARN pair: transports zmq at P and tcp, zmq at D; set transport"] * 2,
    ),
    "KV that does not arrive": (
        of_d(failure="peer_timeout"),
        ["FAIL pair: the KV did not arrive (peer_timeout), and D computed the prompt; open P's"]
        * 2,
    ),
    "no transfer": (
        of_d(transfers=False),
        ["FAIL pair: no KV was transferred, and D computed the prompt; D's log"] * 2,
    ),
    "another answer": (
        of_d(is_wrong=True),
        ["FAIL pair: the answer of the pair is not that of D alone; do not use this pair"] * 2,
    ),
    "answers that differ by themselves": (
        of_d(is_random=True, is_wrong=True),
        ["FAIL pair: D alone gives two answers to one prompt"] * 2,
    ),
    "no way back from D to P": (
        of_p(transfers=False),
        ["WARN pair: P read no KV back from D, so later turns compute their whole prompts"] * 2,
    ),
    "NixlConnector beside ours": (
        of_p(nixl=True),
        ["FAIL pair: they have different connectors; start both"] * 2,
    ),
    "an address that no engine dials": (
        of_d(address="169.254.1.1"),
        ["FAIL decode: no engine dials it: control address"],
    ),
    "D on the loopback, and P not": (
        of_p(address="192.0.2.7"),
        [
            "FAIL prefill: its control port tcp://192.0.2.7:",
            "FAIL prefill: its data port tcp://192.0.2.7:",
            *["FAIL pair: D refuses P's grants: control address"] * 2,
        ],
    ),
    "corrupt loads in the past": (
        lambda fleet: fleet.d.counters.update({'disagg_failed_loads_total{reason="corrupt"}': 3}),
        ["WARN decode: 3 loads of KV have failed since its start: corrupt; look at the network"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault: str, key_file: str) -> None:
    plant, expected = FAULTS[fault]
    found = []
    for line in troubles(examined(plant, key_file)):
        head, _, rest = line.partition(": ")
        found.append(f"{' '.join(head.split()[:2])}: {rest}")
        assert "; " in line, "each line has what to do"
    assert len(found) == len(expected), found
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(beginning), found


async def connect_to(port: int) -> list[tuple[str, str]]:
    endpoint = f"tcp://127.0.0.1:{port}"
    return await instance_checks._closed_ports([WorkerInfo("w", endpoint, endpoint)])


def test_a_standstill_of_the_doctor_is_no_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stopped the doctor for a while had healthy ports reported as closed."""
    monkeypatch.setattr(instance_checks, "CONNECT_SECONDS", 0.2)
    connect = asyncio.open_connection

    async def stand_still(*address: Any) -> Any:
        time.sleep(0.6)
        return await connect(*address)

    monkeypatch.setattr(asyncio, "open_connection", stand_still)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert run(connect_to(server.getsockname()[1])) == []


def test_a_port_that_does_not_answer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_checks, "CONNECT_SECONDS", 0.1)

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", hang)
    ((port, problem),) = run(connect_to(1))
    assert (port, problem) == ("its data port tcp://127.0.0.1:1", "no answer within 0.1 s")


FROZEN = {
    "frozen": "FAIL decode: GET /health: no answer within 0.1 s; start it",
    "probe_hangs": "FAIL decode: POST /v1/completions: no answer within 0.1 s; read the end",
}


@pytest.mark.parametrize("fault", FROZEN)
def test_a_frozen_instance(fault: str, key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def examine() -> FleetReport:
        async with running() as fleet:
            vars(fleet.d)[fault] = True
            request: Any = server_client.ServerClient._request

            async def with_limit(client: Any, *words: Any) -> Any:
                """Gives little time to the request that will not be answered."""
                is_frozen = client._pool._address[1] == fleet.d.port
                hangs = fault == "frozen" or words[1] == "/v1/completions"
                seconds = 0.1 if is_frozen and hangs else 20.0
                return await request(client, *words[:3], seconds)

            monkeypatch.setattr(server_client.ServerClient, "_request", with_limit)
            return await report_on(*fleet.flags(), "--key-file", key_file)

    (line,) = troubles(run(examine()))
    head, _, rest = line.partition(": ")
    assert f"{' '.join(head.split()[:2])}: {rest}".startswith(FROZEN[fault])


@pytest.fixture
def keyless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_world.ScriptedEngine, "key", FleetKey(None, insecure=True))


def test_a_fleet_of_nixl_connector(keyless: None) -> None:
    report = examined(all_engines(nixl=True), "")
    assert troubles(report) == []
    assert [(pair.kv_bytes, pair.transports, pair.early_share) for pair in report.pairs] == [
        (KV_BYTES, [], None)
    ] * 4
    lines = list(report.lines())
    assert any("stock vLLM shows neither its kv_role" in line for line in lines)
    assert any("by UCX (stock vLLM does not state the transport)" in line for line in lines)


def test_a_side_channel_on_the_loopback(keyless: None) -> None:
    async def examine() -> FleetReport:
        async with running() as fleet:
            all_engines(nixl=True, side_channel=("localhost", 5600))(fleet)
            far = fleet.d.url.replace("127.0.0.1", "localhost")
            return await report_on("--prefill", fleet.p.url, "--decode", far)

    (line,) = troubles(run(examine()))
    assert "P's side channel is localhost:5600, and D has another address" in line
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in line


def test_without_a_key_file(keyless: None) -> None:
    report = examined(of_p(plain=True), "")
    assert any("and no key was given; give --key-file" in line for line in troubles(report))


def test_a_proxy_given_as_an_instance(key_file: str) -> None:
    async def examine() -> FleetReport:
        async with running() as fleet:
            route = fleet.d._route

            async def as_proxy(call: object) -> None:
                if call.path == "/disagg/instances":  # type: ignore[attr-defined]
                    await call.json([])  # type: ignore[attr-defined]
                else:
                    await route(call)  # type: ignore[arg-type]

            vars(fleet.d)["_route"] = as_proxy
            return await report_on(
                "--prefill", fleet.p.url, "--decode", fleet.d.url, "--key-file", key_file
            )

    (line,) = troubles(run(examine()))
    assert "this is a vllm-disagg proxy; give its instances" in line


def test_the_report_has_neither_key_nor_prompt(key_file: str) -> None:
    report = examined(lambda fleet: None, key_file)
    text = json.dumps(report.document()) + "\n".join(report.lines())
    assert KEY_TEXT[:8] not in text
    assert instance_checks.PROMPT_TEXT[:20] not in text and "kv_transfer_params" not in text


def test_hostile_answers_are_findings(key_file: str) -> None:
    """An answer of any bytes gives a line, never a traceback."""

    async def garbage(call: object) -> None:
        call.raw_write("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\xff\x1b[")  # type: ignore[attr-defined]

    def plant(fleet: ScriptedFleet) -> None:
        fleet.d.models = ["\x1b[2Jname"]
        vars(fleet.d1)["_route"] = garbage

    lines = troubles(examined(plant, key_file))
    assert len(lines) == 1 and "GET /v1/models answered 200: no vLLM" in lines[0]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("text", [b"\xff", b'h_bucket1"} 2 12\n', b"a b c\n"])
def test_a_page_of_another_format_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        MetricsPage(text)


def test_numbers_that_are_none_do_not_count() -> None:
    page = MetricsPage(b'a{r="x"} +Inf\na{r="y"} NaN\na{r="z"} 2\n')
    assert page.total("a") == 2 and page.by_label("a", "r") == {"z": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "http://a:1"], "--prefill and --decode need each other"),
        (["--prefill", "a:1", "--decode", "http://b:1"], "--prefill: 'a:1' is not an instance's"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "http://a:1 is given twice"),
        (["--proxy", "http://a:1", "--decode", "http://b:1"], "--proxy names the instances"),
        (["--proxy", "a"], "--proxy: a is not a URL such as"),
        (["--admin-key-file", "x"], "--admin-key-file needs --proxy"),
        (["--gpu", "--proxy", "http://a:1"], "--gpu goes with --json only"),
        (["--proxy", "http://a:1", "--key-file", "/none"], "key file /none: No such file"),
        (["--proxy", "http://a:1", "--admin-key-file", "/none"], "--admin-key-file /none: No such"),
    ],
)
def test_bad_flags_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == 2
    answer = capsys.readouterr()
    assert answer.err.startswith(f"vllm-disagg doctor: {message}"), answer.err
    assert answer.err.count("\n") == 1 and not answer.out


@pytest.mark.parametrize("flag", ["--proxy", "--key-file", "--admin-key-file"])
def test_an_empty_text_is_a_variable_that_is_not_set(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine would be checked than was meant, or nothing proved, with exit status 0."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--proxy", "http://a:1", flag, ""])
    answer = capsys.readouterr()
    assert ended.value.code == 2 and not answer.out
    assert f"argument {flag}: an empty text names nothing; leave the flag out" in answer.err
