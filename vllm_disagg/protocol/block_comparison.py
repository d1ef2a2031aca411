"""BlockComparison: are the blocks of a load those of its source?  Judges sums and Confirm.  Pure.

Once all bytes of a source are in place, both ends sum the same blocks, one sum a layer:

    Confirm of the source    sums of this rank    verdict
    missing                  any                  pending
    without sums             any                  equal: its word alone counts, as of an engine
                                                  that cannot sum
    with sums                missing              pending
    with sums                the same             equal
    with sums                others, or none      different

Only whole blocks with the same bytes at both ends are compared (`ReadPlan.is_comparable`).  Of a
source without any, Confirm alone counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.extents import Extent
from .events import SumBlocks
from .read_plan import ReadPlan
from .reasons import Uncompared


@dataclass
class BlockComparison:
    """The compared blocks of one source in one load."""

    source: str  # its name
    plans: list[ReadPlan]  # of the blocks that are compared; empty without a comparison
    is_whole: bool  # these are all blocks that are read
    sums: list[int] | None = None  # of these blocks here; None until they are summed
    confirmed_sums: list[int] | None = None  # of the same blocks at the source; None until Confirm

    @property
    def is_pending(self) -> bool:
        """Whether Confirm is missing, or sums of this rank that it needs."""
        if self.confirmed_sums is None:
            return True
        return self.needs_sums and self.sums is None

    @property
    def needs_sums(self) -> bool:
        """Whether Confirm has sums with which those of this rank are compared."""
        return bool(self.plans and self.confirmed_sums)

    @property
    def is_equal(self) -> bool:
        """Whether all that could be compared is equal; of one that is not pending."""
        return not self.needs_sums or self.sums == self.confirmed_sums

    @property
    def uncompared(self) -> Uncompared | None:
        """Why not all blocks of a settled source were compared; None if all are equal."""
        if not self.is_whole:
            return Uncompared.OTHER_LAYOUT
        return None if self.confirmed_sums else Uncompared.NO_SENDER_SUMS

    def difference(self) -> str:
        """Returns which layer of this rank differs from the source's; the first one of several."""
        assert self.sums is not None and self.confirmed_sums is not None
        if not self.sums:
            return "this rank could not sum its blocks"
        layers: list[int] = []
        for plan in self.plans:
            layers += range(plan.shard.layer, plan.shard.layer_end)
        pairs = zip(layers, self.sums, self.confirmed_sums, strict=False)
        for layer, ours, theirs in pairs:
            if ours != theirs:
                return f"layer {layer} of this rank has other bytes than at {self.source}"
        return f"{self.source} has summed {len(self.confirmed_sums)} layers of {len(layers)}"

    def extents(self, token_end: int) -> list[Extent]:
        """Returns what the source sums for its Confirm, in its numbering."""
        return [plan.whole(token_end) for plan in self.plans]

    def sum_blocks(self, transfer: str, token_end: int) -> SumBlocks:
        """Returns the action that sums the same blocks here."""
        extents: list[Extent] = []
        blocks: list[list[int]] = []
        for plan in self.plans:
            ours, ids, _ = plan.target(plan.whole(token_end))
            extents.append(ours)
            blocks.append(ids)
        return SumBlocks(transfer, self.source, extents, blocks)
