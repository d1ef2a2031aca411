"""Gives engines more time than their users give them, when imported at the start of Python.

A step takes up to half a second in Triton's interpreter, and any may on a crowded machine. P's
lookup at D is answered at the end of a step, and an engine that computes answers no probe of the
proxy.
"""

from __future__ import annotations

from import_hooks import before_import

REUSE_SECONDS = 5.0  # less than the stall timeout of these tests
LIVENESS_SECONDS = 20.0


def wait_longer_for_reuse() -> None:
    """Replaces the limits of a prefill leg, which are for steps of milliseconds."""
    from vllm_disagg.protocol import prefill_leg

    prefill_leg.REUSE_LOOKUP_SECONDS = REUSE_SECONDS
    prefill_leg.REUSE_STALL_SECONDS = REUSE_SECONDS


def wait_longer_for_engines() -> None:
    """Has the proxy keep engines that are silent for some seconds."""
    import msgspec

    from vllm_disagg.proxy import settings

    from_arguments = settings.from_arguments

    def patient_settings(*arguments: object) -> settings.ProxySettings:
        found = from_arguments(*arguments)
        return msgspec.structs.replace(found, liveness_timeout=LIVENESS_SECONDS)

    settings.from_arguments = patient_settings


before_import("kv_connectors.scheduler", wait_longer_for_reuse)
before_import("vllm_disagg.proxy.main", wait_longer_for_engines)
