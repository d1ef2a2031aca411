"""Sums of products of a few quantities: all that a least-squares fit keeps of its samples.

An engine adds its steps and its hand-offs to such sums and exports them; the planner solves the
fits. No quantity is negative, so each sum only grows. The sums over a window of time are the
difference of two reads.
"""

from __future__ import annotations

from collections.abc import Sequence

# Of a step. `prompt_steps` is 1 if it computes tokens of prompts, else 0. `tokens` are those of
# prompts; `squares` grows by (done + chunk)^2 - done^2 with each chunk. `sequences` decode one
# token, and attend to `contexts` tokens together. `seconds` is how long it kept the engine busy.
STEP_QUANTITIES = (
    "steps",
    "prompt_steps",
    "tokens",
    "squares",
    "sequences",
    "contexts",
    "seconds",
)
# Of the load of a prompt's KV: `seconds` from the end of its prefill until `bytes`, those that
# were missing then, are in place.
HANDOFF_QUANTITIES = ("handoffs", "bytes", "seconds")
# Of the arrival of a request: `seconds` for which it waited for the end of a step that was running.
ARRIVAL_QUANTITIES = ("arrivals", "seconds")


def product_names(quantities: Sequence[str]) -> list[str]:
    """Returns the names of the products of each two quantities, and of each with itself."""
    names = []
    for position, first in enumerate(quantities):
        names += [f"{first}*{second}" for second in quantities[position:]]
    return names


class ProductSums:
    """Sums of the products of some quantities over samples."""

    def __init__(self, quantities: Sequence[str]) -> None:
        """Creates sums without samples."""
        self._names = product_names(quantities)
        self._sums = [0.0] * len(self._names)

    def add(self, sample: Sequence[float]) -> None:
        """Adds a sample: one value for each quantity, in their order."""
        sums = self._sums
        place = 0
        for position, first in enumerate(sample):
            if first:
                for offset, second in enumerate(sample[position:], place):
                    sums[offset] += first * second
            place += len(sample) - position

    def take(self) -> dict[str, float]:
        """Returns the sums that are not zero, by name, and sets all to zero."""
        taken = {name: total for name, total in zip(self._names, self._sums, strict=True) if total}
        self._sums = [0.0] * len(self._names)
        return taken
