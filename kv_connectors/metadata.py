"""What the scheduler's connector and the workers' connectors tell each other through vLLM.

vLLM carries these itself, within one engine. They hold machine events as they are: there is no
translation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import WorkerInfo


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, with each step."""

    prefill: list[events.ForSender] = field(default_factory=list)
    decode: list[events.ForReceiver] = field(default_factory=list)
    # Transfer -> vLLM's id, for those that are new: apart, because both legs of a transfer may come
    # to one engine.
    serving: dict[str, str] = field(default_factory=dict)
    loading: dict[str, str] = field(default_factory=dict)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start."""

    worker: WorkerInfo
    layers: list[str]  # names, in the order of `worker.holds`


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, after each step in which there is something to say."""

    found: dict[
        str, list[int]
    ]  # by transfer that was sought: how many tokens there are for each rank that knows by now

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """What this step's workers say, as one."""
        assert isinstance(other, WorkerMetadata)
        names = {**self.found, **other.found}
        return WorkerMetadata(
            {name: [*self.found.get(name, ()), *other.found.get(name, ())] for name in names}
        )
