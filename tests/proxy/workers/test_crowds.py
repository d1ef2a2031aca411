"""Tests many clients of a proxy at once: of one id, and such as say nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from pathlib import Path

import pytest
import trustme
from whole_proxy import engines, whole_proxy

from proxy_world import Call, Client, ScriptedEngine, World, answer, until

SAME_ID = 1000  # requests
SILENT = 100  # connections
OTHERS = 8  # connections of health checks and of the test that come and go
HEADER_SECONDS = 12.0
GOOD = 50  # requests beside them
LIMIT_SECONDS = 60.0  # of each wait


async def echo(call: Call) -> None:
    """Answers as a healthy engine, with the prompt."""
    if call.leg == "prefill":
        await answer(call)
    else:
        ids = [call.headers["x-request-id"], call.body["request_id"]]
        await call.json({"text": call.body["prompt"], "ids": ids})


async def test_a_thousand_requests_of_one_id_have_their_own_answers(tmp_path: Path) -> None:
    p, d = ScriptedEngine("p", "prefill", echo), ScriptedEngine("d", "decode", echo)

    async def ask(world: World, number: int) -> None:
        prompt = f"prompt {number}"
        asked = {"model": "m", "prompt": prompt, "request_id": "same"}
        body = json.dumps(asked).encode()
        reply = await world.ask("POST", "/v1/completions", body, x_request_id="same")
        assert reply.status == 200, reply.body
        assert reply.json() == {"text": prompt, "ids": ["same", "same"]}
        assert reply.headers["x-request-id"] == "same"

    async with engines(p, d) as world, whole_proxy(tmp_path, world):
        await asyncio.gather(*(ask(world, number) for number in range(SAME_ID)))
    prefilled = {
        call.grant.transfer: call.body["prompt"] for call in p.legs("prefill") if call.grant
    }
    # D alone computes a prompt that P was too busy for.
    assert len(prefilled) == len(p.legs("prefill")) > SAME_ID / 2, "each has its own transfer"
    for call in d.legs("decode"):
        assert call.grant
        assert prefilled.get(call.grant.transfer, call.body["prompt"]) == call.body["prompt"]


class SecureWorld(World):
    """A world whose proxy serves https."""

    trust: ssl.SSLContext | None = None

    async def connect(self) -> Client:
        made = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust)
        self.clients.append(Client(*made))
        return self.clients[-1]


def half_hello() -> bytes:
    """Returns the first half of a client's first message of TLS."""
    sent = ssl.MemoryBIO()
    session = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    hello = sent.read()
    return hello[: len(hello) // 2]


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_silent_connections_stop_no_request_and_end(tmp_path: Path, scheme: str) -> None:
    """They say nothing, or stop in the middle of a request's head or of a handshake."""
    openings = [b"", b"POST /v1/completions HT", b"GET / HTTP/1.1\r\nhost: x\r\n"]
    flags = ["--header-timeout", str(HEADER_SECONDS)]
    trust = None
    if scheme == "https":
        openings = [b"", half_hello(), b"\x16\x03\x01"]
        authority = trustme.CA()
        chain = tmp_path / "chain.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(chain))
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        flags += ["--ssl-certfile", str(chain)]
    p, d = ScriptedEngine("p", "prefill"), ScriptedEngine("d", "decode")
    async with engines(p, d) as plain:
        world = SecureWorld(plain.prefills, plain.decodes)
        world.trust = trust
        async with whole_proxy(tmp_path, world, *flags) as proxy:
            before = proxy.descriptors
            silent = []
            for at in range(SILENT):
                made = Client(*await asyncio.open_connection("127.0.0.1", world.port))
                made.writer.write(openings[at % len(openings)])
                silent.append(made)
            await until(lambda: proxy.descriptors > before + SILENT - OTHERS, LIMIT_SECONDS)
            replies = await asyncio.gather(*(world.post() for _ in range(GOOD)))
            assert Counter(reply.status for reply in replies) == {200: GOOD}
            # Who has said nothing by HTTP may be about to: such a connection has its idle time.
            ending = [c for at, c in enumerate(silent) if trust or openings[at % len(openings)]]
            async with asyncio.timeout(LIMIT_SECONDS):
                for client in ending:
                    await client.reader.read()
            replies = await asyncio.gather(*(world.post() for _ in range(GOOD)))
            assert Counter(reply.status for reply in replies) == {200: GOOD}
            for client in (*world.clients, *silent):
                client.close()
            for engine in (p, d):
                engine.drop_connections()
            await until(lambda: proxy.descriptors < before + OTHERS, LIMIT_SECONDS)
