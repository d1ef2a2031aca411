"""Our engines behind routers of others, unchanged: exact answers, and all KV travels, once.

vllm-router (VLLM_ROUTER names the program, else that of `make .venv-router`), vLLM's own toy proxy
(TOY_PROXY names its script, from vLLM's tests) and a minimal application of Ray Serve (RAY_PYTHON
names a Python with `ray[serve]`). A router that is not there is skipped.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import (
    TIMEOUT_SECONDS,
    Body,
    Record,
    ask,
    at_once,
    body,
    english,
    expect_exact_or_clean,
    expect_same,
    record,
    tokens,
)
from conftest import Main
from engines import PEER_TIMEOUT_SECONDS, ROOT, Process, free_port, get, wait
from test_api import stream
from test_exact import LENGTHS, LONG, Transfers, needed
from test_handovers import misuses
from two_legs import ask_both, send_decode, send_prefill

pytestmark = pytest.mark.wide

VLLM_ROUTER = Path(os.environ.get("VLLM_ROUTER", ROOT / ".venv-router/bin/vllm-router"))
TOY_PROXY = Path(os.environ.get("TOY_PROXY", "/nowhere"))
RAY_PYTHON = Path(os.environ.get("RAY_PYTHON", "/nowhere"))
RAY_APP = Path(__file__).parent / "ray_pd_app.py"
RUNS = 4  # of each length, at the same time
CHATS = 8


class Router(Process):
    """A router of others in front of the two engines."""

    def __init__(self, main: Main, name: str, command: list[str], port: int, health: str) -> None:
        """Prepares the command. `health`: the path that answers when it is ready."""
        super().__init__(name, command, main.machine.folder, port, {"OPENAI_API_KEY": "none"})
        self._health = health

    def is_ready(self) -> bool:
        """Returns whether the router serves."""
        try:
            return get(self.url, self._health, 2.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False


def vllm_router(main: Main) -> Router:
    if not VLLM_ROUTER.exists():
        pytest.skip(f"no vllm-router at {VLLM_ROUTER}: `make routers` installs it")
    port = free_port()
    command = [str(VLLM_ROUTER), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", main.prefill.url, "--decode", main.decode.url]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port())]
    return Router(main, "vllm-router", command, port, "/v1/models")


def toy_proxy(main: Main) -> Router:
    if not TOY_PROXY.exists():
        pytest.skip(
            "no toy proxy of vLLM: TOY_PROXY names tests/v1/kv_connector/nixl_integration/"
            "toy_proxy_server.py of vLLM's repository"
        )
    port = free_port()
    command = [sys.executable, str(TOY_PROXY), "--port", str(port)]
    for side, engine in (("prefiller", main.prefill), ("decoder", main.decode)):
        command += [f"--{side}-hosts", "127.0.0.1", f"--{side}-ports", str(engine.port)]
    return Router(main, "toy-proxy", command, port, "/healthcheck")


def ray_serve(main: Main) -> Router:
    if not RAY_PYTHON.exists():
        pytest.skip("no Ray Serve: RAY_PYTHON names a Python with ray[serve]")
    port = free_port()
    command = [str(RAY_PYTHON), str(RAY_APP), str(port), main.prefill.url, main.decode.url]
    return Router(main, "ray-serve", command, port, "/health")


@pytest.fixture(params=[vllm_router, toy_proxy, ray_serve], ids=lambda make: make.__name__)
def router(main: Main, request: pytest.FixtureRequest) -> Iterator[Router]:
    made: Router = request.param(main)
    main.machine.start(made)
    yield made
    main.machine.stop(made)


def check_many(main: Main, send: Callable[[Body], Record], name: str) -> None:
    """Sends more than a hundred requests; all answers are exact, and all KV travels once."""
    lengths = [*LENGTHS, *LONG]
    for length in lengths:
        asked = [body(tokens(length, f"{name} {length} {at}"), 16) for at in range(RUNS)]
        plain = at_once(lambda one: ask(main.plain.url, one), asked)
        with Transfers(main) as transfers:
            ours = at_once(send, asked)
            transfers.expected = needed([length] * RUNS)
        for one, expected in zip(ours, plain, strict=True):
            expect_same(one, expected, f"{name} {length}")
    assert len(lengths) * RUNS >= 100
    main.expect_well(1)


def test_a_hundred_answers_by_both_legs(main: Main) -> None:
    check_many(main, lambda one: ask_both(main.prefill.url, main.decode.url, one), "two legs")


def test_a_hundred_answers_behind_a_router(main: Main, router: Router) -> None:
    check_many(main, lambda one: ask(router.url, one), router.name)
    path = "/v1/chat/completions"
    before = main.decode.received
    for at in range(CHATS):
        asked = body([{"role": "user", "content": english(900, f"{router.name} {at}")}], 24)
        expect_same(ask(router.url, asked, path), ask(main.plain.url, asked, path))
        prompt = tokens(300 + 40 * at, f"{router.name} stream {at}")
        expect_same(stream(router.url, prompt, 24), stream(main.plain.url, prompt, 24))
    wait("their KV arrives, too", lambda: main.decode.received > before)


def ask_in_trouble(url: str, asked: Body) -> Record:
    """Returns the answer; a broken connection, and each status but 200, is an explicit error."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)
    try:
        header = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), header)
        answer = connection.getresponse()
        text = answer.read()
    except (ConnectionError, http.client.HTTPException) as error:
        return Record(599, error=f"error: {error}")
    finally:
        connection.close()
    if answer.status != 200:
        return Record(answer.status, error=f"error: {text!r}")
    return record(answer.status, json.loads(text))


def check_in_trouble(main: Main, router: Router, fault: Callable[[], None], name: str) -> None:
    """Sends requests of which most are under way when the fault comes; all are exact or clean."""
    asked = [body(tokens(1500 + at, f"{name} {router.name} {at}"), 24) for at in range(8)]
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    timer = threading.Timer(0.5, fault)
    timer.start()
    ours = at_once(lambda one: ask_in_trouble(router.url, one), asked)
    timer.join()
    for one, expected in zip(ours, plain, strict=True):
        expect_exact_or_clean(one, expected)


def test_misused_parameters_behind_a_router(main: Main, router: Router) -> None:
    """A client's own parameters, and other people's: its answer, never another's KV."""
    asked = body(tokens(400, f"misused {router.name}"), 24)
    plain = ask(main.plain.url, asked)
    other = body(tokens(400, f"of another client {router.name}"))
    params, others = (send_prefill(main.prefill.url, one) for one in (asked, other))
    assert params is not None and others is not None
    cases = {"as they are": params, **misuses(params, others)}
    bodies = [{**asked, "kv_transfer_params": misused} for misused in cases.values()]
    answers = at_once(lambda one: ask_in_trouble(router.url, one), bodies)
    for name, answer in zip(cases, answers, strict=True):
        expect_same(answer, plain, f"{router.name}, {name}")
    before = main.decode.received
    expect_same(send_decode(main.decode.url, other, others), ask(main.plain.url, other))
    wait("the other client's KV is still there", lambda: main.decode.received > before)
    main.expect_well(1)


def test_a_p_that_freezes_behind_a_router(main: Main, router: Router) -> None:
    def freeze() -> None:
        main.prefill.signal(signal.SIGSTOP)
        time.sleep(5)
        main.prefill.signal(signal.SIGCONT)

    check_in_trouble(main, router, freeze, "frozen")
    main.expect_well(1)


def test_a_p_that_is_killed_and_started_again_behind_a_router(main: Main, router: Router) -> None:
    check_in_trouble(main, router, lambda: main.prefill.signal(signal.SIGKILL), "killed")
    main.prefill.stop(gently=0)
    main.machine.start_again(main.prefill)
    main.legs.close()
    main.legs = main.new_legs()
    main.expect_well(1)
    before = main.decode.received
    for at in range(4):
        asked = body(tokens(700 + at, f"after {router.name} {at}"), 24)
        expect_same(ask(router.url, asked), ask(main.plain.url, asked))
    wait("KV of the new P arrives", lambda: main.decode.received > before)


def test_p_between_the_legs(main: Main) -> None:
    """Frozen, killed and restarted: D has parameters of a P that does not answer any more."""
    asked = {name: body(tokens(900, f"P is {name}")) for name in ("frozen", "killed", "restarted")}
    plain = {name: ask(main.plain.url, one) for name, one in asked.items()}
    params = {name: send_prefill(main.prefill.url, one) for name, one in asked.items()}
    assert all(params.values())
    before = main.decode.received

    def check(name: str) -> None:
        began = time.monotonic()
        expect_same(send_decode(main.decode.url, asked[name], params[name]), plain[name], name)
        assert time.monotonic() - began < PEER_TIMEOUT_SECONDS + 13, name

    main.prefill.signal(signal.SIGSTOP)
    check("frozen")
    main.prefill.signal(signal.SIGCONT)
    main.prefill.stop(gently=0)
    check("killed")
    main.machine.start_again(main.prefill)
    check("restarted")
    assert main.decode.received == before
    main.legs.close()
    main.legs = main.new_legs()
    main.expect_well(1)
