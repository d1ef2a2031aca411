"""The KV cache of one rank, with symbols as elements, and the attention that reads it.

The memory is the product's own `HostMemory`, so pieces are cut, moved and rearranged by its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from symbols import (
    EMPTY,
    POISON,
    Positions,
    Symbols,
    TokenStory,
    has_other_format,
    head_terms,
    in_format,
    layer_factor,
    symbols_of,
)
from world_models import LayerKind, RankLayer, WorldModel

from vllm_disagg.kv.layout import RankLayout
from vllm_disagg.kv.memory import HostMemory


@dataclass(frozen=True)
class StepPart:
    """One request in one step: it computes the tokens `start` to `end`.

    Those from `right_end` on are drafts that are not accepted, and `written_end` is behind all KV
    that the step writes: the layers of a draft write some more.
    """

    request: str
    start: int
    end: int
    right_end: int
    written_end: int
    blocks: Sequence[Sequence[int]]  # ids by KV-cache group
    samples: bool  # whether the step generates a token
    drafts: int  # the last ones of these tokens
    story: TokenStory

    def sampled_tokens(self) -> list[int]:
        """Returns the tokens that the step generates: accepted drafts, and one more."""
        if not self.samples:
            return []
        first = self.end - self.drafts
        return self.story.tokens[first : self.right_end + 1]


class Access(NamedTuple):
    """Elements of one layer kind in one KV-cache group, of all requests of a step."""

    blocks: Positions
    slots: Positions
    hashes: Symbols
    positions: Positions
    owners: list[tuple[str, int, int]]  # request, and its first and last entries


class WrongRead(NamedTuple):
    """An element that a request has read and that was not its own."""

    rank: str
    request: str
    layer: int
    position: int
    found: int
    expected: int


@dataclass
class StepBatch:
    """All requests of one step, and the elements that they read and write."""

    model: WorldModel
    parts: list[StepPart]
    _cached: dict[tuple[int, LayerKind, bool], Access] = field(default_factory=dict)

    def writes(self, layer: RankLayer) -> Access:
        """Returns the elements that the step writes in a layer with attention."""
        return self._access(layer, is_read=False)

    def reads(self, layer: RankLayer) -> Access:
        """Returns the elements that the step reads in a layer with attention."""
        return self._access(layer, is_read=True)

    def _access(self, layer: RankLayer, *, is_read: bool) -> Access:
        key = (layer.group, layer.kind, is_read)
        if key not in self._cached:
            self._cached[key] = self._find(layer, is_read=is_read)
        return self._cached[key]

    def _find(self, layer: RankLayer, *, is_read: bool) -> Access:
        positions = []
        blocks = []
        hashes = []
        owners = []
        count = 0
        for part in self.parts:
            first = part.start
            if is_read:
                first = self.model.first_token_read(layer.kind, part.start)
            own = np.arange(first, part.right_end)
            ids = np.array(part.blocks[layer.group], dtype=np.int64)
            positions.append(own)
            blocks.append(ids[own // layer.block_size])
            hashes.append(part.story.hashes[first + 1 : part.right_end + 1])
            owners.append((part.request, count, count + len(own)))
            count += len(own)
        joined = np.concatenate(positions)
        return Access(
            blocks=np.concatenate(blocks),
            slots=joined % layer.block_size,
            hashes=np.concatenate(hashes),
            positions=joined,
            owners=owners,
        )


class SymbolCache:
    """The memory of one rank."""

    def __init__(
        self,
        rank: str,
        layers: Sequence[RankLayer],
        layout: RankLayout,
        blocks: int,
        block_size: int,
    ) -> None:
        """Creates empty memory. `block_size`: of the layers with attention."""
        self._rank = rank
        tensors = 1 + max(layer.tensor for layer in layers)
        heads = max(layer.heads for layer in layers)
        self._tensors: Symbols = np.zeros((tensors, blocks, heads, block_size), dtype=np.uint64)
        planes = []
        for number, layer in enumerate(layers):
            rows = self._tensors[layer.tensor].reshape(blocks, -1).view(np.uint8)
            planes.append([rows[:, : layout.kind(number).block_bytes[0]]])
        self.memory = HostMemory(planes, layout)

    def clear(self, blocks: Sequence[int]) -> None:
        """Clears blocks in all tensors, as vLLM does before some layers use them."""
        self._tensors[:, list(blocks)] = 0

    def compute(self, layer: RankLayer, batch: StepBatch, wrong: dict[str, WrongRead]) -> None:
        """Computes one layer of a step; adds the first wrong read of each request to `wrong`.

        A request with a wrong read in an earlier layer writes poison: its KV is wrong too.
        """
        if layer.kind is LayerKind.STATE:
            self._advance_states(layer, batch, wrong)
            return
        tensor = self._tensors[layer.tensor]
        writes = batch.writes(layer)
        tensor[writes.blocks, :, writes.slots] = _own_symbols(layer, writes.hashes)
        for request, first, end in writes.owners:
            if request in wrong:
                tensor[writes.blocks[first:end], :, writes.slots[first:end]] = POISON
        self._write_drafts(layer, batch)
        reads = batch.reads(layer)
        found = tensor[reads.blocks, :, reads.slots]
        expected = _own_symbols(layer, reads.hashes)
        if batch.model.has_several_formats:
            self._check_unused(layer, batch, wrong)
        differs = found != expected
        if not differs.any():
            return
        for request, first, end in reads.owners:
            places = np.argwhere(differs[first:end])
            if len(places) and request not in wrong:
                at, head = first + int(places[0][0]), int(places[0][1])
                wrong[request] = WrongRead(
                    self._rank,
                    request,
                    layer.number,
                    int(reads.positions[at]),
                    int(found[at, head]),
                    int(expected[at, head]),
                )

    def _write_drafts(self, layer: RankLayer, batch: StepBatch) -> None:
        """Writes KV of drafts that are not accepted: a later step must not read it."""
        tensor = self._tensors[layer.tensor]
        for part in batch.parts:
            places = np.arange(part.right_end, part.written_end)
            if not len(places):
                continue
            ids = np.array(part.blocks[layer.group], dtype=np.int64)
            tensor[ids[places // layer.block_size], :, places % layer.block_size] = POISON

    def _check_unused(
        self, layer: RankLayer, batch: StepBatch, wrong: dict[str, WrongRead]
    ) -> None:
        """Adds requests whose last block holds numbers of another format behind its last token.

        Kernels multiply them by 0, and get NaN if they are none in this layer's format.
        """
        tensor = self._tensors[layer.tensor]
        for part in batch.parts:
            block = part.blocks[layer.group][(part.right_end - 1) // layer.block_size]
            first = (part.right_end - 1) % layer.block_size + 1
            unused = tensor[block, : layer.heads, first:]
            places = np.argwhere(has_other_format(unused, layer.kind is LayerKind.FULL))
            if len(places) and part.request not in wrong:
                head, slot = places[0]
                wrong[part.request] = WrongRead(
                    self._rank,
                    part.request,
                    layer.number,
                    part.right_end + int(slot),
                    int(unused[head, slot]),
                    int(EMPTY),
                )

    def _advance_states(
        self, layer: RankLayer, batch: StepBatch, wrong: dict[str, WrongRead]
    ) -> None:
        """Reads the state before the step's tokens, and writes the one after them."""
        tensor = self._tensors[layer.tensor]
        for part in batch.parts:
            block = part.blocks[layer.group][0]
            before, after = _own_symbols(layer, part.story.hashes[[part.start, part.end]])
            found = tensor[block, 0, 0]
            if part.start and found != before[0] and part.request not in wrong:
                wrong[part.request] = WrongRead(
                    self._rank,
                    part.request,
                    layer.number,
                    part.start,
                    int(found),
                    int(before[0]),
                )
            tensor[block, 0, 0] = POISON if part.request in wrong else after[0]


def _own_symbols(layer: RankLayer, hashes: Symbols) -> Symbols:
    """Returns the right symbols of a layer's heads, for the hashes of their prefixes."""
    terms = head_terms(layer.first_head, layer.heads)
    symbols = symbols_of(hashes, layer_factor(layer.number), terms)
    return in_format(symbols, layer.kind is LayerKind.FULL)
