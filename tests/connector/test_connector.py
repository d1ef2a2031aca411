"""DisaggConnector: refusals before an engine serves."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors import compat, connector
from kv_connectors.connector import DisaggConnector
from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError


def test_handshakes_of_another_connector_are_refused() -> None:
    """MultiConnector hands every child the handshakes of the first one."""
    ours: Any = SimpleNamespace(_scheduler=None)
    theirs: Any = {(0, 0): object()}
    with pytest.raises(ConfigError, match="must be the first"):
        DisaggConnector.set_xfer_handshake_metadata_pp_aware(ours, theirs)


def test_old_names_of_settings_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm_disagg"):
        connector._warn_of(Config(), {"key_file": "k", "silence": 3.0, "piece": 4096})
    assert [record.getMessage() for record in caplog.records] == [
        "kv_connector_extra_config: silence is now peer_timeout, piece is now piece_bytes;"
        " version 0.2 refuses the old names"
    ]
    caplog.clear()
    connector._warn_of(Config(), {"key_file": "k", "peer_timeout": 3.0})
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "use_mla", "preferred"),
    [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)],
)
def test_on_gpus_heads_are_contiguous(device: str, use_mla: bool, preferred: bool) -> None:
    vllm_config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    found = DisaggConnector.get_required_kvcache_layout(vllm_config)
    assert found == (compat.HEADS_TOGETHER if preferred else None)
    vllm_config.model_config = None  # vLLM asks before it knows the model, too
    assert DisaggConnector.get_required_kvcache_layout(vllm_config) is None


def test_the_preferred_layout_is_one_of_vllms() -> None:
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32")
    preferred = layouts.KVCacheLayout[str(compat.HEADS_TOGETHER)]
    assert preferred.is_layer_compact
    assert preferred.is_block_contiguous
