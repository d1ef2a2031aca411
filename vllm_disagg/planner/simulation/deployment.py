"""Deployments to simulate: pools of replicas, and the hand-off between them."""

from __future__ import annotations

import msgspec

from ...fleet.conventions import DEFAULT_POLICY, DEFAULT_PREFILL_CONCURRENCY, PolicyName
from ..cost.hardware import LINKS, NetworkLink
from ..cost.latency import LatencyModel, PathDelay
from ..cost.sizes import KvLayers
from .replica import SchedulingRules


class ReplicaPool(msgspec.Struct, frozen=True):
    """Pool of `count` equal replicas, each with its times and its tokens of KV."""

    count: int
    latency: LatencyModel
    kv: int
    rules: SchedulingRules = SchedulingRules()


class Handoff(msgspec.Struct, frozen=True):
    """Parameters of the KV transfer from P to D."""

    link: NetworkLink = LINKS["none"]
    bytes_per_token: float = 0.0  # of layers without a window
    layers: int = 1
    overlap: bool = True
    # Legs at one prefill instance: the proxy's --prefill-concurrency.
    concurrency: int = DEFAULT_PREFILL_CONCURRENCY
    windows: tuple[KvLayers, ...] = ()
    state_bytes: float = 0.0  # of a sequence
    notice: float = 0.0  # seconds from the last byte at D, or at P, to its step

    @property
    def reads_back(self) -> bool:
        """Whether P can read KV from D: in legs that run at once, of layers without windows."""
        return self.overlap and not self.windows and not self.state_bytes

    def wire_seconds(self, tokens: int) -> float:
        """Returns the seconds that the KV of so many tokens of a prompt occupies the link."""
        held = sum(group.held_bytes(tokens) for group in self.windows) + self.state_bytes
        return (self.bytes_per_token * tokens + held) / self.link.bandwidth


class Deployment(msgspec.Struct, frozen=True):
    """Pools behind the proxy; `decode` None means colocated."""

    prefill: ReplicaPool
    decode: ReplicaPool | None = None
    handoff: Handoff = Handoff()
    policy: PolicyName = DEFAULT_POLICY
    # DistServe's clock: TTFT when the prefill ends, `output` steps after it, TPOT over `output`
    distserve: bool = False
    path: PathDelay = PathDelay()
    # The proxy's flags of these names, without effect on colocated replicas.
    min_prompt_bytes: int = 0
    spill: bool = False
