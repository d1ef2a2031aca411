"""Mistakes in the connector's settings end vLLM before its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig

import kv_connectors
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives vLLM's own completion of a configuration back after each test."""
    complete = VllmConfig.__post_init__
    monkeypatch.setattr(VllmConfig, "__post_init__", getattr(complete, "__wrapped__", complete))


def use(extra: dict[str, Any], connector: str = "DisaggConnector") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


def test_a_wrong_setting_ends_the_configuration() -> None:
    kv_connectors.register()
    with pytest.raises(ConfigError, match="did you mean transport"):
        VllmConfig(kv_transfer_config=use({"transprot": "zmq", "insecure": True}))


def test_a_wrong_setting_of_a_child_ends_it_too() -> None:
    kv_connectors.register()
    child = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lease": "soon"},
    }
    with pytest.raises(ConfigError, match="lease is 'soon'"):
        VllmConfig(kv_transfer_config=use({"connectors": [child]}, "MultiConnector"))


def test_a_key_file_that_is_missing_ends_it(tmp_path: Path) -> None:
    kv_connectors.register()
    gone = str(tmp_path / "gone.key")
    with pytest.raises(ConfigError, match="No such file"):
        VllmConfig(kv_transfer_config=use({"key_file": gone}))


def test_right_settings_and_other_connectors_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed: list[object] = []
    monkeypatch.setattr(VllmConfig, "__post_init__", completed.append)
    kv_connectors.register()
    kv_connectors.register()  # vLLM loads plugins again in some processes
    path = str(tmp_path / "fleet.key")
    keys.create(path)
    VllmConfig(kv_transfer_config=use({"key_file": path}))
    VllmConfig(kv_transfer_config=use({"lease": "soon"}, "NixlConnector"))
    VllmConfig()
    assert len(completed) == 3
