"""Proof, when an engine starts, that KV blocks are read and written where vLLM has them.

Theory. The kernels address blocks by arithmetic on strides; vLLM addresses them by tensor views. A
fault in that arithmetic moves wrong bytes under a right checksum. So bytes are written through
vLLM's views and read by the kernels, then written by the kernels and read through the views:

    a pattern, through the view -> source blocks -> gather -> bytes, compared with the view
                                   target blocks <- scatter <- the same bytes
    the targets, through the view, are compared with the pattern, and all blocks beside them with
    what they held before

Sums are compared with those of torch. All of this is done for one layer of each form. The other
layers of that form differ from it in their place only, and kernels gather and scatter at one place.
So of these the source blocks are gathered, and compared. Otherwise the proof would take too long
for models with several caches in each of many layers.

Last comes the order with the forward pass: behind a slow
write a copy must read what was written, once the event is reached that `facts.py` would wait for. A
copy that waits for nothing is launched too. It must read the older bytes, or the write was not
slow, and the proof of the order proves nothing.

All of it runs before vLLM has used a block, and puts back
what the blocks held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_disagg.errors import ProofFailed
from vllm_disagg.kv.extents import Extent

from . import block_sums
from .kernels import CHECKSUM_WORD_BYTES, WORD_TYPES, checksum
from .memory import DeviceMemory
from .summing import Summer

log = logging.getLogger("vllm_disagg.worker")

MIN_BLOCKS = 9  # fewer have no three sources and three targets
MAX_WORD_BYTES = max(WORD_TYPES)
SEED = 20261122


def prove(
    memory: DeviceMemory,
    caches: Mapping[str, torch.Tensor],
    names: Sequence[str],
    num_blocks: int,
    rank: int,
) -> None:
    """Proves that the kernels move these caches rightly on this GPU; else raises ProofFailed.

    `names`: of the layers, in the memory's order. `rank`: vLLM's global rank, for the log.
    """
    started_at = time.monotonic()
    proof = StartProof(memory, caches, names, num_blocks)
    if difference := proof.difference():
        raise ProofFailed(difference)
    log.info(
        "worker %d: %d layers are read and written in GPU memory as vLLM does; %s (%.0f ms)",
        rank,
        len(names),
        "copies follow the forward pass"
        if proof.proves_order
        else "the order of copies was not proved, because the control copy was not early",
        (time.monotonic() - started_at) * 1000,
    )


class StartProof:
    """The proof over the KV caches of one worker.

    `caches`: vLLM's tensors by layer name. `names`: the layers in the order of `memory`.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        caches: Mapping[str, torch.Tensor],
        names: Sequence[str],
        num_blocks: int,
    ) -> None:
        """Takes the caches as they are; all blocks must be free."""
        self._memory = memory
        self._runtime = memory.runtime
        self._stream = memory.runtime.current_stream()  # also that of torch's own operations here
        self._names = names
        self._num_blocks = num_blocks
        self._caches = [caches[name] for name in names]
        self._views: list[list[torch.Tensor]] = []  # by layer
        self.proves_order = False  # set by `difference`
        self._known_ids: dict[tuple[int, ...], torch.Tensor] = {}
        self._random = torch.Generator(memory.device)
        self._random.manual_seed(SEED)
        # Far apart, and near both ends: an error in a stride grows with the number of the block.
        self._sources = [1, num_blocks // 2, num_blocks - 1]
        self._targets = [num_blocks - 2, 2, num_blocks // 2 + 2]

    def difference(self) -> str:
        """Returns what differs from vLLM's own view of its caches; empty if nothing does."""
        if self._num_blocks < MIN_BLOCKS:
            return (
                f"{self._num_blocks} KV blocks are too few for the proof, which needs {MIN_BLOCKS}"
            )
        self._views = [_views(cache, self._num_blocks) for cache in self._caches]
        proved: set[Any] = set()
        for layer, name in enumerate(self._names):
            form = self._form(layer)
            is_first = form not in proved
            proved.add(form)
            difference = (
                self._layer_difference(layer) if is_first else self._place_difference(layer)
            )
            if difference:
                return f"layer {name}: {difference}"
        return self._order_difference()

    def _form(self, layer: int) -> tuple[Any, ...]:
        """Returns all of a layer but its place, of which alignment decides the kernels' words."""
        planes = [
            (plane.shape, plane.base % MAX_WORD_BYTES) for plane in self._memory.planes[layer]
        ]
        views = [(view.shape, view.stride()) for view in self._views[layer]]
        return self._memory.shape.layers[layer], tuple(planes), tuple(views)

    def _order_difference(self) -> str:
        """Returns whether a copy precedes what it must follow; notes whether that is a proof."""
        block = self._sources[0]
        views = [view[block] for view in self._views[0]]
        saved = [view.clone() for view in views]
        older = self._in_wire_order(0, [block])
        newer = [self._random_like(view) for view in views]
        copies = self._runtime.new_stream()
        # The first allocations of a stream may wait for the GPU, and so for the slow write.
        self._copy_on(copies, block, len(older))
        try:
            self._runtime.delay(self._stream)
            for view, content in zip(views, newer, strict=True):
                self._runtime.copy(view, content, self._stream)
            early = self._copy_on(copies, block, len(older))
            self._runtime.record_event().synchronize()
            late = self._copy_on(copies, block, len(older))
            self.proves_order = torch.equal(early, older)
            parts = [
                content.permute(_memory_order(view)).reshape(-1)
                for view, content in zip(views, newer, strict=True)
            ]
            if torch.equal(late, torch.cat(parts)):
                return ""
            return "a copy reads a block before the work that was launched earlier has written it"
        finally:
            self._wait()
            for view, content in zip(views, saved, strict=True):
                view.copy_(content)

    def _copy_on(self, stream: Any, block: int, size: int) -> torch.Tensor:
        """Returns the bytes of a block of the first layer, read on a stream of their own."""
        wire = self._runtime.empty(size, stream)
        extent = Extent(0, 1, 0, self._memory.shape.kind(0).block_size)
        self._memory.move(extent, [block], wire, stream, gather=True)
        self._runtime.record_event(stream).synchronize()
        return wire

    def _place_difference(self, layer: int) -> str:
        """Returns what differs at the place of a layer whose form is proved."""
        saved = self._contents(layer, self._sources)
        try:
            self._put(layer, self._sources, [self._random_like(content) for content in saved])
            sources = self._in_wire_order(layer, self._sources)
            return self._gather_difference(layer, sources, torch.zeros_like(sources))
        finally:
            self._put(layer, self._sources, saved)

    def _layer_difference(self, layer: int) -> str:
        witnesses = self._witnesses(layer)
        saved = {other: self._contents(other, blocks) for other, blocks in witnesses.items()}
        try:
            for other, contents in saved.items():
                noise = [self._random_like(content) for content in contents]
                self._put(other, witnesses[other], noise)
            return self._copy_difference(layer)
        finally:
            for other, contents in saved.items():
                self._put(other, witnesses[other], contents)

    def _copy_difference(self, layer: int) -> str:
        """Returns what differs when the sources of one layer are copied to its targets."""
        sources = self._in_wire_order(layer, self._sources)
        wire = torch.zeros_like(sources)
        if difference := self._gather_difference(layer, sources, wire):
            return difference
        if difference := self._sum_difference(layer, wire):
            return difference
        kept = self._witnesses(layer)
        kept[layer] = [block for block in kept[layer] if block not in self._targets]
        before = {other: self._contents(other, blocks) for other, blocks in kept.items()}
        self._move(layer, self._targets, wire, gather=False)
        if not torch.equal(self._in_wire_order(layer, self._targets), sources):
            return "the scatter kernel writes other bytes than vLLM's view of the blocks has then"
        for other, blocks in kept.items():
            after = self._contents(other, blocks)
            if not all(map(torch.equal, after, before[other])):
                return "the scatter kernel writes into blocks beside its own"
        return ""

    def _gather_difference(self, layer: int, sources: torch.Tensor, wire: torch.Tensor) -> str:
        """Gathers the sources of one layer into `wire`; returns what differs from vLLM's view."""
        self._move(layer, self._sources, wire, gather=True)
        if not torch.equal(wire, sources):
            return "the gather kernel reads other bytes than vLLM's view of the blocks has"
        return ""

    def _sum_difference(self, layer: int, wire: torch.Tensor) -> str:
        """Returns which sum of the sources differs from torch's; `wire`: their bytes."""
        total = self._runtime.upload([0], self._stream)
        self._runtime.launch(self._stream, checksum, wire, total)
        self._wait()
        is_aligned = wire.numel() % CHECKSUM_WORD_BYTES == 0
        words = wire.view(torch.int32 if is_aligned else torch.uint8).to(torch.int64)
        places = torch.arange(len(words), dtype=torch.int64, device=wire.device)
        if int(total) != int((words * (2 * places + 3)).sum()):
            return "the checksum kernel gives another sum than torch"
        if not block_sums.can_sum([self._memory.planes[layer]]):
            return ""
        sums = Summer(self._memory).start([layer], self._sources, self._stream)
        self._wait()
        for block, found in zip(self._sources, sums[0].tolist(), strict=True):
            if found != int(block_sums.sum_of_bytes(self._in_wire_order(layer, [block]))):
                return "the kernel for block sums gives another sum than torch"
        return ""

    # Blocks ---------------------------------------------------------------------------------------
    def _witnesses(self, layer: int) -> dict[int, list[int]]:
        """Returns by layer the blocks of a copy, and those beside them."""
        copied = {*self._sources, *self._targets}
        beside = {block + step for block in copied for step in (-1, 1)}
        found = {layer: sorted(block for block in copied | beside if self._is_block(block))}
        # vLLM overlays layers of different groups, so only those of the same group are apart.
        layout = self._memory.shape
        for other in (layer - 1, layer + 1):
            is_layer = 0 <= other < len(layout.layers)
            if is_layer and layout.kind(other).group == layout.kind(layer).group:
                found[other] = sorted(copied)
        return found

    def _is_block(self, number: int) -> bool:
        return 0 <= number < self._num_blocks

    # All blocks of a layer in one call: a launch for each would take most of the proof's time.
    def _contents(self, layer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Returns copies of blocks through vLLM's views of a layer, as bytes."""
        ids = self._ids(blocks)
        return [view[ids] for view in self._views[layer]]

    def _put(self, layer: int, blocks: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Writes blocks through vLLM's views of a layer."""
        ids = self._ids(blocks)
        for view, content in zip(self._views[layer], contents, strict=True):
            view[ids] = content

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """Returns the numbers of blocks in GPU memory."""
        key = tuple(blocks)
        if key not in self._known_ids:
            self._known_ids[key] = torch.tensor(key, device=self._memory.device)
        return self._known_ids[key]

    def _in_wire_order(self, layer: int, blocks: Sequence[int]) -> torch.Tensor:
        """Returns the bytes of blocks as vLLM's view has them, in the order of memory."""
        parts = []
        for view, content in zip(self._views[layer], self._contents(layer, blocks), strict=True):
            axes = [axis + 1 for axis in _memory_order(view[0])]
            parts.append(content.permute(0, *axes).reshape(-1))
        return torch.cat(parts)

    def _random_like(self, content: torch.Tensor) -> torch.Tensor:
        return torch.randint(
            0,
            256,
            content.shape,
            dtype=torch.uint8,
            device=content.device,
            generator=self._random,
        )

    def _move(self, layer: int, blocks: Sequence[int], wire: torch.Tensor, *, gather: bool) -> None:
        """Copies blocks to `wire` or back by the kernels, and waits for that."""
        kind = self._memory.shape.kind(layer)
        extent = Extent(layer, layer + 1, 0, len(blocks) * kind.block_size)
        self._memory.move(extent, blocks, wire, self._stream, gather=gather)
        self._wait()

    def _wait(self) -> None:
        self._runtime.record_event(self._stream).synchronize()


def _memory_order(view: torch.Tensor) -> list[int]:
    """Returns the axes of a block from the slowest to the fastest."""
    return sorted(range(view.dim()), key=lambda axis: -view.stride(axis))


def _views(cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Returns vLLM's view of a layer as bytes: (blocks, ..., bytes of an element).

    There are two, of keys and of values, where vLLM keeps them apart. Kernel blocks are grouped
    into the blocks that vLLM's scheduler counts.
    """
    parts = list(cache.unbind(0)) if cache.shape[0] % num_blocks else [cache]
    parts = [
        part if part.shape[0] == num_blocks else part.unflatten(0, (num_blocks, -1))
        for part in parts
    ]
    # The new axis makes the view possible whatever the strides are.
    return [part.unsqueeze(-1).view(torch.uint8) for part in parts]
