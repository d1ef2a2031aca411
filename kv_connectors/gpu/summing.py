"""Sums the KV blocks of prompts: those that this engine computes, and those that it has loaded.

Theory. Sums of computed blocks are launched on the stream on which vLLM computes, behind the step.
So they are right by the order of that stream, whatever the copies do, and before vLLM can write
into the blocks again. Sums of loaded blocks have a stream of their own: all copies into these
blocks have ended. If both are equal, the blocks hold what was computed.

No call here waits for the GPU. Of computed blocks, `facts.py` holds the sums back until they are in
host memory. Of loaded blocks, the driver polls.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_disagg.kv.block_sums import SummedBlocks, layer_sum
from vllm_disagg.protocol import events

from . import block_sums
from .block_sums import SummedPlanes
from .memory import DeviceMemory

log = logging.getLogger("vllm_disagg.gpu")

SUM_BYTES = 8  # one int64


class Summer:
    """Launches sums of blocks; used by one thread."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Has no table yet."""
        self._memory = memory
        self._runtime = memory.runtime
        self._launches: dict[tuple[int, ...], list[SummedPlanes]] = {}  # by layers

    def prepare(self, layers: Sequence[int], stream: Any) -> list[SummedPlanes]:
        """Returns the launches for some layers; uploads their table at the first call."""
        key = tuple(layers)
        if key not in self._launches:
            planes = [self._memory.planes[layer] for layer in layers]
            self._launches[key] = block_sums.summed_planes(
                planes, lambda numbers: self._runtime.upload(numbers, stream)
            )
        return self._launches[key]

    def start(self, layers: Sequence[int], blocks: Sequence[int], stream: Any) -> torch.Tensor:
        """Launches sums; returns pinned int64 memory for them, (layers, blocks).

        The sums are there when the work launched so far on the stream has ended.
        """
        launches = self.prepare(layers, stream)
        ids = self._runtime.upload(list(blocks), stream)
        shape = (len(layers), len(blocks))
        size = SUM_BYTES * len(layers) * len(blocks)
        sums = self._runtime.empty(size, stream).view(torch.int64).view(shape)
        self._runtime.launch(stream, block_sums.sum_blocks, launches, ids, sums)
        host = self._runtime.pinned(size).view(torch.int64).view(shape)
        self._runtime.copy(host, sums, stream)
        return host


@dataclass
class _Prompt:
    """A prompt that this engine computes."""

    blocks: list[list[int]]  # ids by KV-cache group
    tokens: int = 0  # scheduled
    tokens_summed: int = 0


class ComputedSums:
    """Sums of the blocks that this engine computes; used by vLLM's thread only."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Uploads the tables of all layers, and waits for that."""
        self._layout = memory.shape
        self._runtime = memory.runtime
        self._summer = Summer(memory)
        self._layers_by_group: dict[int, list[int]] = defaultdict(list)
        for layer in range(len(memory.shape.layers)):
            self._layers_by_group[memory.shape.kind(layer).group].append(layer)
        stream = self._runtime.current_stream()
        for layers in self._layers_by_group.values():
            self._summer.prepare(layers, stream)
        # vLLM may compute on another stream than this one.
        self._runtime.record_event(stream).synchronize()
        # By transfer; None if its blocks are not summed.
        self._prompts: dict[str, _Prompt | None] = {}

    def note(self, event: events.ForSender) -> None:
        """Notes the blocks of a prompt, or its end."""
        if not isinstance(event, events.BlocksScheduled):
            self._prompts.pop(event.transfer, None)
            return
        if event.transfer not in self._prompts:
            new = None if event.writes_more else _Prompt([[] for _ in event.blocks])
            self._prompts[event.transfer] = new
        prompt = self._prompts[event.transfer]
        if prompt is None:
            return
        for blocks, added in zip(prompt.blocks, event.blocks, strict=True):
            blocks += added
        prompt.tokens = event.tokens

    def leave_out(self, transfer: str) -> None:
        """Sums no more blocks of a prompt: a gap would give later ones the numbers of others."""
        if transfer in self._prompts:
            self._prompts[transfer] = None

    def sum_step(self, transfers: Sequence[str]) -> list[events.BlocksSummed]:
        """Launches the sums of this step's blocks; returns facts that hold when they have ended.

        Behind the step's own work, and before that of the next one.
        """
        prompts: dict[str, _Prompt] = {}
        for name in transfers:
            prompt = self._prompts.get(name)
            if prompt is not None:
                prompts[name] = prompt
        if not prompts:
            return []
        layers: dict[str, list[SummedBlocks]] = {
            name: [SummedBlocks(0, [])] * len(self._layout.layers) for name in prompts
        }
        try:
            for group in self._layers_by_group:
                self._sum_group(group, prompts, layers)
        except RuntimeError as error:
            for name in prompts:
                self.leave_out(name)
            log.warning(
                "gpu: the blocks of %d prompts were not summed (%s); D cannot compare them",
                len(prompts),
                error,
            )
            return []
        facts = []
        for name, prompt in prompts.items():
            prompt.tokens_summed = prompt.tokens
            facts.append(events.BlocksSummed(name, prompt.tokens, layers[name]))
        return facts

    def _sum_group(
        self,
        group: int,
        prompts: dict[str, _Prompt],
        layers: dict[str, list[SummedBlocks]],
    ) -> None:
        """Launches the sums of one KV-cache group, of all prompts at once."""
        numbers = self._layers_by_group[group]
        block_size = self._layout.kind(numbers[0]).block_size
        ids: list[int] = []
        places: dict[str, tuple[int, int, int]] = {}
        for name, prompt in prompts.items():
            # A block that was not full before is summed again.
            first = prompt.tokens_summed // block_size
            end = -(-prompt.tokens // block_size)
            places[name] = (first, len(ids), len(ids) + end - first)
            ids += prompt.blocks[group][first:end]
        stream = self._runtime.current_stream()
        sums = _unsigned(self._summer.start(numbers, ids, stream))
        for name, (first, start, end) in places.items():
            for row, layer in enumerate(numbers):
                layers[name][layer] = SummedBlocks(first, sums[row, start:end])


@dataclass
class _Started:
    """A SumBlocks whose sums have been launched."""

    action: events.SumBlocks
    parts: list[tuple[int, torch.Tensor]]  # by extent: number of the first block, sums
    event: Any


class LoadedSums:
    """Sums of the blocks that this engine has loaded; see `driver.BlockSummer`."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Creates the stream; used by the driver's thread from then on."""
        self._layout = memory.shape
        self._runtime = memory.runtime
        self._summer = Summer(memory)
        self._stream = memory.runtime.new_stream()
        self._started: list[_Started] = []
        self._failed: list[events.LayersSummed] = []

    @property
    def is_summing(self) -> bool:
        """Whether a sum has been started and not taken."""
        return bool(self._started or self._failed)

    def start(self, action: events.SumBlocks) -> None:
        """Launches the sums of an action."""
        parts = []
        try:
            for extent, blocks in zip(action.extents, action.blocks, strict=True):
                layers = range(extent.layer, extent.layer_end)
                first = extent.token // self._layout.kind(extent.layer).block_size
                parts.append((first, self._summer.start(layers, blocks, self._stream)))
            event = self._runtime.record_event(self._stream)
        except RuntimeError as error:
            log.warning(
                "gpu: the blocks of transfer %s were not summed (%s); this engine recomputes them",
                action.transfer,
                error,
            )
            self._failed.append(action.completed([]))
            return
        self._started.append(_Started(action, parts, event))

    def take_completed(self) -> list[events.LayersSummed]:
        """Returns the sums that have ended since the last call."""
        completed = self._failed
        self._failed = []
        # In the order of their stream: the first one that has not ended hides no other.
        while self._started and self._started[0].event.query():
            started = self._started.pop(0)
            sums = []
            for first, host in started.parts:
                sums += [layer_sum(SummedBlocks(first, row)) for row in _unsigned(host)]
            completed.append(started.action.completed(sums))
        return completed


def _unsigned(host: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns a view of int64 memory; sums may still be written into it."""
    return host.numpy().view(np.uint64)
