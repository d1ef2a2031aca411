"""The rules of `legs.py`, checked on the events that the legs of one engine send to its workers."""

from __future__ import annotations

from collections import defaultdict

from vllm_disagg.protocol import events
from vllm_disagg.protocol.request_leg import NULL_BLOCK, StepEvents


class EventRules:
    """Checks the events of an engine, step by step."""

    def __init__(self, block_sizes: list[int]) -> None:
        self.block_sizes = block_sizes
        self.requests: set[str] = set()  # transfers of which the workers know the request
        self.blocks: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in block_sizes])
        self.tokens: dict[str, int] = {}  # announced, by transfer that is served
        self.served_ended: set[str] = set()
        self.lookups: set[str] = set()
        self.loads: set[str] = set()
        self.loads_ended: set[str] = set()  # cancelled or skipped

    def check(self, step: StepEvents) -> None:
        """Of one step."""
        self.requests |= {*step.serving_requests, *step.loading_requests}
        for served in step.for_sender:
            assert served.transfer not in self.served_ended, f"after its end: {served}"
            if isinstance(served, events.BlocksScheduled):
                self.check_scheduled(served)
            else:
                self.served_ended.add(served.transfer)
        for read in step.for_receiver:
            assert read.transfer not in self.loads_ended, f"after its end: {read}"
            match read:
                case events.LookupRequested():
                    assert read.transfer not in self.lookups | self.loads, f"too late: {read}"
                    self.lookups.add(read.transfer)
                case events.LoadExpected():
                    assert read.transfer not in self.loads, f"is loaded: {read}"
                case events.LoadRequested():
                    self.check_load(read)
                case events.LoadCancelled():
                    assert read.transfer in self.lookups | self.loads, f"never began: {read}"
                    self.loads_ended.add(read.transfer)
                case events.LoadSkipped():
                    assert read.transfer not in self.loads, f"is loaded: {read}"
                    self.loads_ended.add(read.transfer)

    def check_scheduled(self, event: events.BlocksScheduled) -> None:
        """Blocks are announced once, and hold all tokens."""
        before = self.tokens.get(event.transfer, 0)
        assert event.tokens > before, f"the same tokens again: {event}"
        self.tokens[event.transfer] = event.tokens
        known = self.blocks[event.transfer]
        # In the other group a block that has left the sliding window may come back.
        assert not set(known[0]) & set(event.blocks[0]), f"a block again: {event}"
        for ids, new, size in zip(known, event.blocks, self.block_sizes, strict=True):
            ids += new
            assert len(ids) * size >= event.tokens, f"tokens without blocks: {event}"

    def check_load(self, event: events.LoadRequested) -> None:
        """A load has blocks for all its tokens, and vLLM is told of its end."""
        assert event.transfer not in self.loads, f"twice: {event}"
        assert event.transfer in self.requests, f"for no request: {event}"
        self.loads.add(event.transfer)
        for group, size in zip(event.blocks, self.block_sizes, strict=True):
            assert group.ids and NULL_BLOCK not in group.ids, f"without blocks: {event}"
            assert group.token + len(group.ids) * size >= event.token_end, f"too few: {event}"

    def is_served(self, transfer: str) -> bool:
        """Whether the workers may serve a transfer at present."""
        return transfer in self.tokens and transfer not in self.served_ended

    def check_ended(self) -> None:
        """Each transfer of which the workers have heard has ended."""
        served = self.tokens.keys() - self.served_ended
        assert not served, f"served for ever: {served}"
        sought = self.lookups - self.loads - self.loads_ended
        assert not sought, f"sought for ever: {sought}"
