"""Engines without a fleet key: they refuse to start, or warn and dial this machine only."""

from __future__ import annotations

import socket
import time

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Main
from direct import probe, with_grant
from engines import Engine

from vllm_disagg.fleet import grants, keys
from vllm_disagg.protocol import peers

EVERYBODY = keys.FleetKey(None)  # what has no key can be minted by everybody


def test_an_engine_without_a_key_does_not_start(main: Main) -> None:
    engine = Engine(
        "D keyless", main.machine.folder, role="kv_consumer", cpu="1", settings={"key_file": ""}
    )
    with pytest.raises(RuntimeError, match="ended"):
        main.machine.start(engine)
    main.machine.stop(engine)
    said = [line for line in engine.log.read_text().splitlines() if "no fleet key" in line]
    assert said and all(
        "key_file" in line and "vllm-disagg key FILE" in line and '"insecure": true' in line
        for line in said
    )


def forged(engine: peers.EngineInfo, *to: str) -> str:
    """Returns a decode grant from a client without a key: its worker claims to hold P's layers."""
    source = peers.WorkerInfo("evil/0", *to, holds=engine.workers[0].holds)
    until = engine.clock + 600.0
    return grants.mint(
        EVERYBODY,
        grants.Grant(2, "decode", grants.new_transfer(), engine.incarnation, [source], until=until),
    )


def test_what_a_client_mints_is_an_ordinary_request(main: Main) -> None:
    """No address is dialled, and the prefix cache holds KV that D has computed.

    The prompt gives the same tokens for all others.
    """
    asked = body(tokens(700, "a system prompt"))
    plain = ask(main.plain.url, asked)
    with socket.create_server(("127.0.0.1", 0)) as evil:
        evil.settimeout(0.5)
        address = f"tcp://127.0.0.1:{evil.getsockname()[1]}"
        began = time.monotonic()
        expect_same(
            ask(main.decode.url, {**asked, **with_grant(forged(main.legs.d, address, address))}),
            plain,
        )
        assert time.monotonic() - began < 10
        with pytest.raises(TimeoutError):
            evil.accept()
    for url in (main.decode.url, main.proxy.url):
        expect_same(ask(url, asked), plain, "another client, the same prompt")
    main.expect_well(1)


@pytest.mark.wide
def test_an_insecure_engine_says_so_and_dials_only_this_machine(main: Main) -> None:
    engine = Engine(
        "D insecure",
        main.machine.folder,
        role="kv_consumer",
        cpu="1",
        settings={"key_file": "", "insecure": True},
    )
    main.machine.start(engine)
    try:
        assert "WARNING" in (
            said := next(
                line for line in engine.log.read_text().splitlines() if "EVERY client" in line
            )
        ), said
        asked = body(tokens(700, "insecure"))
        plain = ask(main.plain.url, asked)
        for to, words in (
            ("tcp://198.51.100.7:9999", "not loopback"),
            ("tcp://169.254.169.254:80", "link-local"),
            ("tcp://localhost:80", "with an IP address"),
        ):
            began = time.monotonic()
            expect_same(
                ask(
                    engine.url,
                    {**asked, **with_grant(forged(probe(EVERYBODY, engine.url), to, to))},
                ),
                plain,
            )
            assert time.monotonic() - began < 10
            assert words in engine.log.read_text()
    finally:
        main.machine.stop(engine)
