"""The vLLM plugin, and the only package here that imports vLLM.

vLLM calls `register` in each of its processes at start (entry point group `vllm.general_plugins`),
with or without this connector in use. So that function does almost nothing.
"""

from __future__ import annotations

from vllm_disagg import descriptor_table


def register() -> None:
    """Registers DisaggConnector, so that vLLM's --kv-transfer-config accepts that name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from . import early_check

    if "DisaggConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "DisaggConnector", "kv_connectors.connector", "DisaggConnector"
        )
    early_check.install()
    _permit_amx()
    descriptor_table.reserve(descriptor_table.ENGINE_DESCRIPTORS)


def _permit_amx() -> None:
    """Requests Linux's permission to use AMX tiles, where the CPU has them.

    vLLM's CPU attention (0.32) uses the tiles without that request. Usually oneDNN has made
    it before. A model whose matrix products are too small for oneDNN's AMX kernels ended its worker
    with SIGILL at the first prompt.
    """
    import torch

    # Private names of torch: without them vLLM uses no AMX either.
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    permit = getattr(torch.cpu, "_init_amx", None)
    if permit and is_supported and is_supported():
        permit()
