"""Lets vLLM's MooncakeStoreConnector run on a CPU, when imported at Python's start.

Its only use of CUDA is an event behind a step. On a CPU a step has ended when its call returns, so
the event has nothing to wait for.
"""

from __future__ import annotations

from types import SimpleNamespace

from import_hooks import before_import

STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"


class EndedStep:
    """Stands for a CUDA event that has already happened."""

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Returns at once."""


def replace_events() -> None:
    """Gives the store's worker a torch whose CUDA events are those above."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker

    class TorchWithEvents:
        cuda = SimpleNamespace(Event=EndedStep)

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    worker.torch = TorchWithEvents()  # type: ignore[attr-defined]


before_import(f"{STORE}.connector", replace_events)
