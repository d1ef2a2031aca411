"""In vLLM's MultiConnector, with a connector that keeps KV on disk (vLLM's example connector)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import ask, body, english, expect_same
from conftest import Main
from engines import BLOCK, Engine, Proxy, beside, wait

pytestmark = pytest.mark.wide


def engine(main: Main, name: str, role: str, cpu: str, disk: Path) -> Engine:
    other = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(disk)},
    }
    return Engine(name, main.machine.folder, *beside(other, role, main.machine.key), cpu=cpu)


@pytest.fixture(scope="module")
def pair(
    main: Main, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine, Proxy]]:
    """Starts engines with separate folders for the KV of the other connector."""
    machine = main.machine
    prefill = engine(main, "multi-P", "kv_producer", "0", tmp_path_factory.mktemp("disk-P"))
    decode = engine(main, "multi-D", "kv_consumer", "1", tmp_path_factory.mktemp("disk-D"))
    proxy = Proxy(machine.folder, prefill, decode, name="multi-proxy")
    machine.start(prefill, decode)
    machine.start(proxy)
    yield prefill, decode, proxy
    machine.stop(proxy, decode, prefill)


def test_both_connectors_at_once(main: Main, pair: tuple[Engine, Engine, Proxy]) -> None:
    """Prompts of one chunk each, which is all that the other connector supports.

    The second time its KV, or ours, is present already.
    """
    _, decode, proxy = pair
    asked = [body(english(BLOCK + 10 * at, f"composed {at}"), 12) for at in range(1, 12)]
    before = decode.received
    for turn in range(2):
        for one in asked:
            expect_same(ask(proxy.url, one), ask(main.plain.url, one), f"turn {turn}:")
        if turn == 0:
            wait("KV moves", lambda: decode.received > before)
    for one in pair[:2]:
        one.wait_free()
        one.expect_alive()
