"""The proxy before other engines: NixlConnector (legs in turn) and plain vLLM, mixed."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from asking import Record, ask, at_once, body, english, expect_exact_or_clean, expect_same, tokens
from conftest import Machine
from engines import BIN, Engine, Proxy, free_port, get, wait

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not importlib.util.find_spec("nixl"),
        reason="nixl is not installed: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1",
    ),
]

LENGTHS = (20, 130, 300, 700)  # of prompts, in tokens: less than a block, and several
BLOCK = 128 * 1024  # bytes of KV that this model has for one


class Fleet:
    """A prefill and a decode engine with NixlConnector and one plain engine, behind the proxy."""

    def __init__(self, machine: Machine) -> None:
        self.prefill = nixl("NP", "kv_producer", "0", machine)
        self.decode = nixl("ND", "kv_consumer", "1", machine)
        self.plain = Engine("whole", machine.folder, cpu="0")
        self.proxy = Proxy(machine.folder, self.prefill, [self.decode, self.plain], name="proxy5")
        machine.start(self.prefill, self.decode, self.plain)
        machine.start(self.proxy)

    def has_moved_more_than(self, before: float) -> bool:
        """Returns whether the decode engine has read so many bytes of KV.

        Its statistics come with its next step, which is late while NIXL's threads spin on the only
        core.
        """
        try:
            ask(self.decode.url, body([5], 1), timeout=10)
            return self.decode.metric("vllm:nixl_bytes_transferred_sum") > before
        except OSError:
            return False

    def ask(self, job: dict[str, object]) -> Record:
        return ask(self.proxy.url, job)


def nixl(name: str, role: str, cpu: str, machine: Machine) -> Engine:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    transfer["kv_load_failure_policy"] = "recompute"  # a request whose KV is lost is computed anew
    side = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return Engine(
        name, machine.folder, "--kv-transfer-config", json.dumps(transfer), cpu=cpu, env=side
    )


@pytest.fixture(scope="module")
def fleet(machine: Machine) -> Iterator[Fleet]:
    made = Fleet(machine)
    yield made
    machine.stop(made.proxy, made.plain, made.decode, made.prefill)


def test_answers_are_exact_and_kv_moves(fleet: Fleet) -> None:
    for at, length in enumerate(LENGTHS):
        job = body(tokens(length, f"nixl {at}"))
        right = ask(fleet.plain.url, job)
        expect_same(fleet.ask(job), right, f"{length} tokens")
    wait(
        "KV of several blocks is transferred",
        lambda: fleet.has_moved_more_than(BLOCK),
        60,
        every=0.5,
    )


def test_the_doctor_proves_the_pair(fleet: Fleet) -> None:
    command = [str(BIN / "vllm-disagg"), "doctor", "--json"]
    command += ["--prefill", fleet.prefill.url, "--decode", fleet.decode.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    print(pair)
    assert pair["kv_bytes"] >= 7 * BLOCK and pair["early_share"] is None


def test_what_cannot_be_split_is_balanced(fleet: Fleet) -> None:
    """Aggregated requests go to both decode instances, also to the one without a connector."""
    before = [engine.metric("vllm:request_success_total") for engine in (fleet.decode, fleet.plain)]
    for at in range(6):
        job = body(tokens(60, f"whole {at}"), echo=True)
        assert fleet.ask(job).status == 200
    for engine, count in zip((fleet.decode, fleet.plain), before, strict=True):
        assert engine.metric("vllm:request_success_total") > count, f"{engine.name} got nothing"


def test_a_killed_prefill_engine_is_survived(fleet: Fleet) -> None:
    """Under load: requests with KV there get an error or the right answer; later ones go on."""
    jobs = [body(tokens(length, f"killed {length}"), 24) for length in LENGTHS]
    right = [ask(fleet.plain.url, job) for job in jobs]
    over, failed, exact = threading.Event(), list[Exception](), 0

    def client(at: int) -> None:
        nonlocal exact
        while not over.is_set():
            at += 1
            try:
                got = fleet.ask(jobs[at % len(jobs)])
                expect_exact_or_clean(got, right[at % len(jobs)])
                exact += got.status == 200
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=client, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2)
        fleet.prefill.stop(gently=0.0)
        wait("the proxy knows", lambda: not fleet.proxy.members()[fleet.prefill.url], 5)
        before = exact
        wait("answers without it", lambda: exact > before + 4 or bool(failed), 60)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed, failed[0]
    for job, expected in zip(jobs, right, strict=True):
        expect_same(fleet.ask(job), expected)
    page = get(fleet.proxy.url, "/metrics", 5.0)[1]
    found = re.search(
        r'^vllm_disagg_fallbacks_total\{reason="no_pair"\} (\S+)$', page, re.MULTILINE
    )
    assert found and float(found[1]) > 0


def respond(url: str, job: dict[str, object]) -> object:
    """Returns a whole answer of /v1/responses without ids and times, or its error."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(
            "POST", "/v1/responses", json.dumps(job), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 200:
        return said["error"]["message"]
    return said["status"], said["output"][0]["content"][0]["text"], said["usage"]["output_tokens"]


def test_what_a_stopping_engine_leaves_is_no_answer(fleet: Fleet, machine: Machine) -> None:
    """vLLM marks a response as completed that it gave up because of a SIGTERM.

    Without another engine its client gets an error.
    """
    proxy = Proxy(machine.folder, [], fleet.plain, name="proxy6")
    machine.start(proxy)
    jobs = [
        {"model": "tiny", "input": english(300, at), "max_output_tokens": 900, "temperature": 0}
        for at in range(4)
    ]
    right = [respond(fleet.plain.url, job) for job in jobs]

    def one(at: int) -> object:
        if at < len(jobs):
            return respond(proxy.url, jobs[at])
        time.sleep(0.7)
        return fleet.plain.stop(gently=20.0)

    got = at_once(one, range(len(jobs) + 1))[:-1]
    said = proxy.log.read_text()
    machine.stop(proxy)
    for answer, expected in zip(got, right, strict=True):
        assert answer == expected or isinstance(answer, str)
    assert "failed a decode leg: " in said, (
        "no answer was under way when the engine was stopped"
    )  # it may be cut or reset
