"""Placements: groups of equal instances, and the units that a search counts them in."""

from __future__ import annotations

import msgspec

from ...fleet.conventions import BYTES_PER_TOKEN


class ReplicaGroup(msgspec.Struct, frozen=True, order=True):
    """Group of `n` equal instances of TP*PP*DP GPUs; with DP the experts are parallel, too."""

    tp: int
    pp: int
    n: int
    dp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.tp * self.pp * self.dp * self.n

    @property
    def ranks(self) -> int:
        """Schedulers of all instances: each data parallel rank has one."""
        return self.dp * self.n

    def __str__(self) -> str:
        words = f"{self.n} x TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "")
        return words + (f" DP{self.dp} EP{self.tp * self.dp}" if self.dp > 1 else "")


class Placement(msgspec.Struct, frozen=True, order=True):
    """Disaggregated groups, or one colocated group (`decode` is None).

    A colocated group has a schedule (`chunked` or prefill first) and a token budget per step.
    Disaggregated ones have the proxy's flags that let the decode side compute prompts whole.
    """

    prefill: ReplicaGroup
    decode: ReplicaGroup | None = None
    budget: int = 0
    chunked: bool = True
    on_decode_gpus: bool = False  # colocated on the decode side's GPU type
    min_prompt_bytes: int = 0
    spill: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of all groups."""
        return self.prefill.gpus + (self.decode.gpus if self.decode else 0)

    @property
    def shapes(self) -> tuple[ReplicaGroup, ReplicaGroup | None]:
        """Groups of one instance each: the shapes without their numbers."""
        one = msgspec.structs.replace(self.prefill, n=1)
        return one, msgspec.structs.replace(self.decode, n=1) if self.decode else None

    @property
    def instances(self) -> int:
        """Instances of all groups."""
        return self.prefill.n + (self.decode.n if self.decode else 0)

    @property
    def proxy_flags(self) -> list[str]:
        """The proxy's flags with which the decode side computes prompts whole; none by default."""
        found = []
        if self.min_prompt_bytes:
            found += ["--min-prompt-bytes", str(self.min_prompt_bytes)]
        return [*found, "--spill"] if self.spill else found

    @property
    def flag_words(self) -> list[str]:
        """The same flags as one text for people; none by default."""
        return [" ".join(self.proxy_flags)] if self.proxy_flags else []

    def is_short(self, prompt: int) -> bool:
        """Whether the decode side computes each prompt of so many tokens."""
        return BYTES_PER_TOKEN * prompt < self.min_prompt_bytes

    def __str__(self) -> str:
        if self.decode:
            return ", ".join([f"prefill {self.prefill}, decode {self.decode}", *self.flag_words])
        schedule = f"chunked prefill of {self.budget} tokens" if self.chunked else "prefill first"
        return f"colocated {self.prefill}, {schedule}"


class Criterion(msgspec.Struct, frozen=True):
    """What goodput is divided by, and what is to be least: GPUs, their price or their power.

    `prefill` and `decode` are the units of one GPU of each side.
    """

    unit: str = "GPU"
    prefill: float = 1.0
    decode: float = 1.0

    def units(self, placement: Placement) -> float:
        """Returns the units of all GPUs of a placement."""
        if placement.decode:
            decode = placement.decode.gpus * self.decode
            return placement.prefill.gpus * self.prefill + decode
        each = self.decode if placement.on_decode_gpus else self.prefill
        return placement.prefill.gpus * each
