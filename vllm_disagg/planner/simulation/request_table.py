"""State of the simulated requests that replicas share."""

from __future__ import annotations

from .token_gaps import TokenGaps
from .workload import WorkloadSample


class RequestTable:
    """State of all requests, in columns indexed by request number."""

    def __init__(self, sample: WorkloadSample, with_gaps: bool = False) -> None:
        prompts = sample.prompts
        count = len(sample)
        self.prompts = prompts
        self.outputs = sample.outputs
        self.prefixes = sample.prefixes
        self.kept = sample.kept or sample.prefixes
        self.block = sample.block
        self.prefill_tokens = prompts.copy()  # after a preemption also the answer so far
        self.tokens_left = [0] * count  # to generate
        self.computed = [0] * count  # of `prefill_tokens`
        self.cached_at_decode = [0] * count  # tokens of the prompt that D had when it reserved KV
        self.context_base = [0] * count  # context less the steps of its group
        self.join_order = [0] * count  # the highest is preempted first
        self.prefill_started_at = [-1.0] * count  # seconds; -1: not yet
        self.first_token_at = [-1.0] * count
        self.gaps = TokenGaps(count) if with_gaps else None
