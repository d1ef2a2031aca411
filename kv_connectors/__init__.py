"""The vLLM plugin: the only package here that imports vLLM.

vLLM calls `register` in each of its processes at start (entry point group `vllm.general_plugins`),
whether or not this connector is used; so it does almost nothing.
"""

from __future__ import annotations


def register() -> None:
    """Make `--kv-transfer-config '{"kv_connector": "DisaggConnector", ...}'` known to vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "DisaggConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "DisaggConnector", "kv_connectors.connector", "DisaggConnector"
        )
