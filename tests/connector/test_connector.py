"""DisaggConnector: refusals before an engine serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors.connector import DisaggConnector
from vllm_disagg.errors import ConfigError


def test_handshakes_of_another_connector_are_refused() -> None:
    """MultiConnector hands every child the handshakes of the first one."""
    ours: Any = SimpleNamespace(_scheduler=None)
    theirs: Any = {(0, 0): object()}
    with pytest.raises(ConfigError, match="must be the first"):
        DisaggConnector.set_xfer_handshake_metadata_pp_aware(ours, theirs)
