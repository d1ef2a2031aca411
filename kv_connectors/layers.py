"""Which layers' KV is final in the middle of a step.

vLLM says after each attention layer that it was computed. Layers are numbered before the first
step, so a layer's number is its address on the wire and says nothing about when it is computed. A
layer may be computed several times in a step (loops over layers, microbatches): its KV is final at
the last call. Layers of states are computed without a call.
"""

from __future__ import annotations

from collections.abc import Sequence


class Layers:
    """Counts the calls of a step.  A layer is final when it has had as many as in any step before.

    So in the first step none is final before the end, and a layer that never has a call never is.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._expected = [0] * len(names)  # calls, by layer
        self._seen = [0] * len(names)
        self.begin()

    def __len__(self) -> int:
        return len(self._numbers)

    def begin(self) -> None:
        """A step begins; the one before is over."""
        self._expected = [max(calls) for calls in zip(self._expected, self._seen, strict=True)]
        self._seen = [0] * len(self._seen)
        self._final, self._limit = (
            0,
            len(self._seen) - 1,
        )  # never all of them: only the step's end is sure to be the last

    def computed(self, name: str) -> int:
        """How many of the first layers are final. 0 for the rest of the step once a final one is
        computed again.
        """
        number = self._numbers.get(name)
        if number is None:  # it uses another layer's KV
            return self._final
        self._seen[number] += 1
        if number < self._final:
            self._final = self._limit = 0
        while (
            self._final < self._limit and self._seen[self._final] == self._expected[self._final] > 0
        ):
            self._final += 1
        return self._final
