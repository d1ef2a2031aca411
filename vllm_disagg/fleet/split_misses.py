"""How many requests of the last minute would have missed an objective with another split.  Pure.

Each observation of the load has a late share and a slow share, as far as it tells:

    late   the work that waits for an instance / TTFT. More instances would have shortened the
           queue, and fewer would have lengthened it.
    slow   seconds of a step with an instance's share of the sequences / TPOT, or, if more, the
           share of the KV cache that their contexts take

Work is counted in seconds of one instance. A request that takes x of an objective misses it with
x^8 / (1 + x^8): at 0.8 one of seven does. Loads vary between instances, and within an observation.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import msgspec

HISTORY_SECONDS = 60.0
FADING_SECONDS = 20.0  # in which an observation comes to count 1/e
STEEPNESS = 8
CERTAIN = 10.0  # of an objective: nobody meets it
LONGEST_QUEUE = 2.0  # of TTFT
MAX_BUSY = 0.9  # of a prefill instance's time, with fewer instances than there are
ROUNDS = 4  # in which the sequences of other instances are found


class StepTimes(Protocol):
    """Times of an instance's steps, as measured or modelled."""

    def decode_step(self, sequences: float, contexts: float) -> float:
        """Returns the seconds of a step of so many sequences with so many tokens of context."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One observation: the instances, and the load of the whole fleet."""

    at: float  # seconds
    prefills: int
    decodes: int
    prefill_work: float  # of the prompts of one second
    waiting_work: float  # of prompts that are not computed yet
    sequences: float  # that decode
    contexts: float  # tokens of context of all of them


class InstanceLimits(msgspec.Struct, frozen=True):
    """What an instance takes: objectives in seconds, KV cache in tokens (0: not known)."""

    ttft: float
    tpot: float
    kv_tokens: int = 0

    def decode_share(self, steps: StepTimes, sequences: float, contexts: float) -> float:
        """Returns the share of TPOT, or of its KV cache, that an instance's load takes."""
        share = steps.decode_step(sequences, contexts) / self.tpot
        return max(share, contexts / self.kv_tokens) if self.kv_tokens else share


class SplitMisses:
    """The observations of the last minute."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()

    def add(self, moment: Moment) -> None:
        """Adds an observation, and forgets old ones."""
        self._moments.append(moment)
        while moment.at - self._moments[0].at > HISTORY_SECONDS:
            self._moments.popleft()

    def share(self, steps: StepTimes, limits: InstanceLimits, prefills: int, decodes: int) -> float:
        """Returns the share of the load that would have missed with so many instances.

        Both numbers are 1 or more. Another number of prefill instances begins the minute without a
        queue. The share is 1 where fewer prefill instances than there are would have
        had no time left: their queue may be about to grow.
        """
        in_time = prefills * limits.ttft  # work that waits no longer than TTFT
        queue = busy = missed = total = 0.0
        last = self._moments[0]
        for moment in self._moments:
            queue = _queue(queue, last, moment, prefills, LONGEST_QUEUE * in_time)
            late = _miss(queue / in_time)
            slow = _miss(_decode_share(steps, limits, moment, decodes))
            weight = math.exp((moment.at - self._moments[-1].at) / FADING_SECONDS)
            missed += weight * (1 - (1 - late) * (1 - slow))
            busy += weight * moment.prefill_work / prefills
            total += weight
            last = moment
        if prefills < last.prefills and busy > MAX_BUSY * total:
            return 1.0
        return missed / total


def _miss(share: float) -> float:
    """Returns how likely a request that takes such a share of an objective misses it."""
    if share > CERTAIN:
        return 1.0
    return share**STEEPNESS / (1 + share**STEEPNESS)


def _queue(queue: float, last: Moment, moment: Moment, prefills: int, longest: float) -> float:
    """Returns the work that would wait at a moment, if `queue` waited at the `last` one.

    What too few instances would have left waiting is counted up to `longest`. So an old overload
    does not speak against them for long.
    """
    took = moment.at - last.at
    if prefills == moment.prefills:
        return moment.waiting_work
    if prefills > moment.prefills:
        grown = moment.waiting_work - last.waiting_work
        shorter = queue + grown - (prefills - moment.prefills) * took
        return min(max(shorter, 0.0), moment.waiting_work)
    longer = queue + (moment.prefill_work - prefills) * took
    return max(min(longer, longest), moment.waiting_work)


def _decode_share(steps: StepTimes, limits: InstanceLimits, moment: Moment, decodes: int) -> float:
    """Returns the share of its limits that the load of each of so many instances takes.

    As many answers begin and end a second, whatever the split. So longer steps hold more sequences
    (Little's law). Some rounds come near to where both agree.
    """
    had = max(1, moment.decodes)
    step = steps.decode_step(moment.sequences / had, moment.contexts / had)
    part = 1 / decodes  # of all sequences, at one instance
    if decodes != had and step > 0:
        for _ in range(ROUNDS):
            longer = steps.decode_step(moment.sequences * part, moment.contexts * part) / step
            part = longer / decodes
    return limits.decode_share(steps, moment.sequences * part, moment.contexts * part)
