"""The vLLM plugin, and the only package here that imports vLLM.

vLLM calls `register` in each of its processes at start (entry point group `vllm.general_plugins`),
with or without this connector in use. So that function does almost nothing.
"""

from __future__ import annotations


def register() -> None:
    """Registers DisaggConnector, so that vLLM's --kv-transfer-config accepts that name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "DisaggConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "DisaggConnector", "kv_connectors.connector", "DisaggConnector"
        )
