"""Load and step times of the engines, from the sums that their connectors export.  Pure: no clock.

`kv_connectors/step_profile.py` describes the sums. Their increase over LOAD_SECONDS is the present
load; a fit over FIT_SECONDS gives the times of steps that other splits would make.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable

import msgspec

from ...product_sums import STEP_QUANTITIES, steps_by_kind, tells_prompts_apart
from ...sums_fit import SumsFit, fit, weighted

LOAD_SECONDS = 5.0  # at least; reads are 2 s apart
FIT_SECONDS = 120.0
# Without a newer read an engine's load is not known. Those that only prefill are read each 10 s.
MAX_AGE_SECONDS = 30.0
MIN_STEPS = 30  # for a fit

_STEP_SUMS = re.compile(
    rb"^vllm:disagg_step_sums_total(\{[^\n]*\}) (\S+)$",
    re.MULTILINE,
)
_PRODUCT = re.compile(rb'product="([a-z_*]+)"')
_CACHE_INFO = re.compile(rb"^vllm:cache_config_info(\{[^\n]*\}) ", re.MULTILINE)
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d+)"')

Sums = dict[str, float]


class FittedSteps(msgspec.Struct, frozen=True):
    """Step times as fitted to the engines' own."""

    fit: SumsFit

    def decode_step(self, sequences: float, contexts: float) -> float:
        """Returns the seconds of a step of so many sequences with so many tokens of context."""
        return self.fit.value([1.0, 0.0, 0.0, 0.0, sequences, contexts])


class EngineLoad(msgspec.Struct, frozen=True):
    """Load of several engines together, and the times of their steps."""

    prefill_work: float  # seconds of one engine, for the prompts of one second
    sequences: float  # that decode, in the mean
    contexts: float  # tokens of all of them, in the mean
    kv_tokens: int  # of the engine that has the fewest; 0: not known
    steps: FittedSteps | None  # None: too few steps yet


class _SumReads:
    """Reads of one engine's sums, the oldest first."""

    def __init__(self) -> None:
        self.reads: deque[tuple[float, Sums]] = deque()
        self.kv_tokens = 0

    def add(self, sums: Sums, now: float) -> None:
        """Adds a read. Sums that fell are of an engine that was started again."""
        if self.reads and any(sums.get(name, 0.0) < old for name, old in self.reads[-1][1].items()):
            self.reads.clear()
        self.reads.append((now, sums))
        while len(self.reads) > 2 and self.reads[1][0] < now - FIT_SECONDS:
            self.reads.popleft()

    def increase(self, seconds: float) -> tuple[float, Sums]:
        """Returns the increase of the sums over so many seconds or a little more, and the time."""
        if len(self.reads) < 2:
            return 0.0, {}
        ended_at, after = self.reads[-1]
        began_at, before = self.reads[0]
        for at, sums in self.reads:
            if at > ended_at - seconds:
                break
            began_at, before = at, sums
        return ended_at - began_at, {k: v - before.get(k, 0.0) for k, v in after.items()}


class StepProfiles:
    """Keeps the sums of each engine, by the URL of its instance."""

    def __init__(self) -> None:
        self._engines: dict[str, _SumReads] = {}
        self._steps: FittedSteps | None = None

    def on_metrics_read(self, url: str, rank: int | None, page: bytes, now: float) -> None:
        """Takes the sums in an engine's metrics page; those of its `rank`, if it has ranks."""
        sums = _step_sums(page, rank)
        if not sums:
            return
        engine = self._engines.setdefault(url, _SumReads())
        engine.add(sums, now)
        engine.kv_tokens = _kv_tokens(page)

    def load(self, urls: Iterable[str], now: float) -> EngineLoad:
        """Returns the load of these engines; forgets all others, and those with old reads."""
        kept = set(urls)
        self._engines = {
            url: engine
            for url, engine in self._engines.items()
            if url in kept and now - engine.reads[-1][0] <= MAX_AGE_SECONDS
        }
        whole: Sums = {}
        are_told_apart = True  # steps with prompts, which engines of older releases do not
        prompts = 0.0
        sequences = 0.0
        contexts = 0.0
        for engine in self._engines.values():
            increase = engine.increase(FIT_SECONDS)[1]
            if increase and not tells_prompts_apart(increase):
                are_told_apart = False
            for name, value in increase.items():
                whole[name] = whole.get(name, 0.0) + value
            seconds, sums = engine.increase(LOAD_SECONDS)
            if seconds > 0:
                prompts += sums.get("prompt_steps*seconds", 0.0) / seconds
                sequences += sums.get("sequences*seconds", 0.0) / seconds
                contexts += sums.get("contexts*seconds", 0.0) / seconds
        if whole.get("steps*steps", 0.0) >= MIN_STEPS:
            kinds = steps_by_kind(whole) if are_told_apart else (whole,)
            self._steps = FittedSteps(fit(weighted(kinds, STEP_QUANTITIES), STEP_QUANTITIES))
        known = [engine.kv_tokens for engine in self._engines.values() if engine.kv_tokens]
        return EngineLoad(prompts, sequences, contexts, min(known, default=0), self._steps)


def _step_sums(page: bytes, rank: int | None) -> Sums:
    """Returns the sums in a page, by the name of their product; none if one is not finite.

    The sums belong together, and those of one engine must not spoil the fit of all.
    """
    label = b"" if rank is None else b'engine="%d"' % rank
    found: Sums = {}
    for labels, value in _STEP_SUMS.findall(page):
        if label in labels and (product := _PRODUCT.search(labels)):
            name = product[1].decode()
            found[name] = found.get(name, 0.0) + float(value)
    return found if all(map(math.isfinite, found.values())) else {}


def _kv_tokens(page: bytes) -> int:
    """Returns the tokens of KV cache of an engine; 0 if its page does not state them."""
    for labels in _CACHE_INFO.findall(page):
        blocks = _BLOCKS.search(labels)
        size = _BLOCK_SIZE.search(labels)
        if blocks and size:
            return int(blocks[1]) * int(size[1])
    return 0
