"""Flags of vllm-router and of vLLM's example proxies mean the same here."""

from __future__ import annotations

import argparse

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy import flags
from vllm_disagg.proxy.settings import ProxySettings, from_arguments


def read(*words: str) -> ProxySettings:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return from_arguments(parser.parse_args(words))


def test_a_command_of_the_toy_proxy() -> None:
    """As in vLLM's tests/v1/kv_connector/nixl_integration and its examples."""
    typed = "--port 8192 --prefiller-hosts a b --prefiller-ports 8100 8101"
    found = read(*typed.split(), "--decoder-host", "c", "--decoder-port", "8200", "8201")
    assert found.port == 8192
    assert found.prefill == ["http://a:8100", "http://b:8101"]
    assert found.decode == ["http://c:8200", "http://c:8201"]
    local = read("--prefiller-ports", "1", "--decoder-ports", "2", "--decoder-hosts", "::1")
    assert (local.prefill, local.decode) == (["http://localhost:1"], ["http://[::1]:2"])


@pytest.mark.parametrize(
    "typed", ["--decoder-hosts a b --decoder-ports 1", "--decoder-hosts a", "--decoder-hosts a b"]
)
def test_hosts_without_ports(typed: str) -> None:
    with pytest.raises(ConfigError, match="give a port for each host"):
        read(*typed.split())


def test_a_command_of_vllm_router() -> None:
    typed = (
        "--vllm-pd-disaggregation --prefill http://p:1 --prefill http://q:1 --decode http://d:1"
        " --policy cache_aware --port 30000 --request-timeout-secs 90 --queue-timeout-secs 7"
        " --max-payload-size 4096 --queue-size 5 --max-concurrent-requests 64 --log-level warning"
        " --cors-allowed-origins https://a.org https://b.org"
    )
    found = read(*typed.split())
    assert (found.prefill, found.decode) == (["http://p:1", "http://q:1"], ["http://d:1"])
    assert (found.policy, found.request_timeout, found.queue_timeout) == ("prefix_aware", 90, 7)
    assert (found.limits.body_bytes, found.queue_size, found.max_requests) == (4096, 5, 64)
    assert found.origins == ["https://a.org", "https://b.org"]
    assert read("--decode", "http://d:1").origins == []
