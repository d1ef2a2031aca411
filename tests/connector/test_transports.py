"""The setting `transport`: transports that are left out, and the reasons."""

from __future__ import annotations

import dataclasses
import logging
from typing import get_args

import pytest

pytest.importorskip("torch")

from kv_connectors import transports
from vllm_disagg.config import Config, TransportName
from vllm_disagg.transports.nixl import agent as nixl_agent
from vllm_disagg.transports.nixl import transport as nixl


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_host_memory_transports_are_left_out_on_gpus(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_disagg").propagate = True
    assert transports.chosen(Config(transport=transport), "cuda") == {}  # type: ignore[arg-type]
    assert f"{transport} is for KV on cpu here, and this is on cuda" in caplog.text


def test_every_transport_but_zmq_has_a_module() -> None:
    assert {"zmq", *transports.TRANSPORTS} == set(get_args(TransportName))


def test_zmq_needs_no_other_transport() -> None:
    assert transports.chosen(Config(transport="zmq")) == {}


def test_compressed_kv_goes_by_zmq_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gloo = dataclasses.replace(transports.TRANSPORTS["gloo"], is_automatic=True)
    monkeypatch.setattr(transports, "TRANSPORTS", {"gloo": gloo})
    assert list(transports.chosen(Config())) == ["gloo"]
    assert transports.chosen(Config(compress="fp8")) == {}


def test_auto_takes_all_transports_that_can_run_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_disagg").propagate = True
    caplog.set_level("INFO", "vllm_disagg")
    monkeypatch.setattr(nixl, "unavailable_reason", lambda *_: "")
    assert list(transports.chosen(Config())) == ["nixl", "tcp"]
    monkeypatch.setattr(nixl, "unavailable_reason", lambda *_: "it is not installed")
    assert list(transports.chosen(Config())) == ["tcp"]
    assert "transport is auto, without nixl: it is not installed" in caplog.text


def test_auto_on_a_gpu_takes_nixl_without_rdma(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All others go through host memory there."""
    logging.getLogger("vllm_disagg").propagate = True
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(nixl_agent, "rdma_devices", lambda: [])
    assert list(transports.chosen(Config(), "cuda")) == ["nixl"]
    assert list(transports.chosen(Config(transport="nixl"), "cuda")) == ["nixl"]
    assert not caplog.records
    monkeypatch.setattr(nixl_agent.importlib.util, "find_spec", lambda _: None)
    assert transports.chosen(Config(), "cuda") == {}
    line = caplog.records[-1].getMessage()
    assert "through host memory, by ZMQ: nixl: nixl is not installed" in line
    assert line.endswith("; nccl: only where transport is nccl")


def test_auto_with_encryption_uses_zmq_only() -> None:
    assert transports.chosen(Config(encrypt_data=True)) == {}
