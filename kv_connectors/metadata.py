"""Messages between the scheduler's half and the workers' halves of the connector.

vLLM carries them within one engine. They hold the events of the protocol machines unchanged.
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
    """From the scheduler to all workers, with each step."""

    sender_events: list[events.ForSender] = field(default_factory=list)
    receiver_events: list[events.ForReceiver] = field(default_factory=list)
    # Transfer id -> vLLM's request id, for new transfers. There are two maps because both legs of
    # one transfer may run on one engine.
    serving_requests: dict[str, str] = field(default_factory=dict)
    loading_requests: dict[str, str] = field(default_factory=dict)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once at start."""

    worker: WorkerInfo
    layers: list[str]  # names, in the order of `worker.holds`
    gpu: str = ""  # UUID of the GPU with the KV; empty on a CPU
    varies: bool = False  # whether values depend on the batch: see gpu/batch_variance.py
    # Unusual ones, by the name of the layer of experts: see gpu/expert_numbers.py.
    expert_numbers: dict[str, str] = field(default_factory=dict)


@dataclass
class FailedProof(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, instead of a Handshake, if it moves no KV."""

    difference: str  # what the proof at its start has found


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, after each step with an answered lookup or a load."""

    lookup_counts: dict[str, list[int]]  # by transfer: tokens found, one count for each rank
    # By vLLM's request id: when its KV was in place here, by the clock of the day.
    landed_at: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Return the results of two workers in one step, joined by transfer and by request."""
        assert isinstance(other, WorkerMetadata)
        joined = {transfer: list(counts) for transfer, counts in self.lookup_counts.items()}
        for transfer, counts in other.lookup_counts.items():
            joined.setdefault(transfer, []).extend(counts)
        landed_at = dict(self.landed_at)
        for request_id, moment in other.landed_at.items():
            landed_at[request_id] = max(moment, landed_at.get(request_id, moment))
        return WorkerMetadata(joined, landed_at)
