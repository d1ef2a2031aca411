"""Sums of products of a few quantities: all that a least-squares fit keeps of its samples.

An engine adds its steps and its hand-offs to such sums and exports them; the planner solves the
fits. No quantity is negative, so each sum only grows. The sums over a window of time are the
difference of two reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
# Beside the products of each two, those of these three over the steps with prompts: the others of
# such steps are products with `prompt_steps`, or with quantities that no other step has. So the
# sums tell steps with prompts from those that only decode.
PROMPT_STEP_QUANTITIES = ("sequences", "contexts", "seconds")
# Of the load of a prompt's KV: `seconds` from the end of its prefill until `bytes`, those that
# were missing then, are in place.
HANDOFF_QUANTITIES = ("handoffs", "bytes", "seconds")
# Of the arrival of a request: `seconds` for which it waited for the end of a step that was running.
ARRIVAL_QUANTITIES = ("arrivals", "seconds")
# Of a prompt's KV that is in place: `seconds` until the end of the step that ran at that moment.
LANDING_QUANTITIES = ("landings", "seconds")


def product_names(quantities: Sequence[str]) -> list[str]:
    """Returns the names of the products of each two quantities, and of each with itself."""
    names = []
    for position, first in enumerate(quantities):
        names += [f"{first}*{second}" for second in quantities[position:]]
    return names


def prompt_step_product(product: str) -> str:
    """Returns the name of a product's sum over steps with prompts only."""
    return f"prompt_steps*{product}"


def step_product_names() -> list[str]:
    """Returns the names of all sums over steps."""
    of_prompts = map(prompt_step_product, product_names(PROMPT_STEP_QUANTITIES))
    return [*product_names(STEP_QUANTITIES), *of_prompts]


def tells_prompts_apart(sums: Mapping[str, float]) -> bool:
    """Returns whether sums over steps, those that are zero included, have those of prompts."""
    return prompt_step_product("seconds*seconds") in sums


def steps_of_both_kinds(
    decodes: Mapping[str, float], prompts: Mapping[str, float]
) -> dict[str, float]:
    """Joins sums over steps that only decode, and over steps with prompts."""
    joined = dict(decodes)
    for name, value in prompts.items():
        joined[name] = joined.get(name, 0.0) + value
    for name in product_names(PROMPT_STEP_QUANTITIES):
        if name in prompts:
            joined[prompt_step_product(name)] = prompts[name]
    return joined


def steps_by_kind(sums: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Splits sums over steps: those of steps that only decode, and of steps with prompts."""
    decodes: dict[str, float] = {}
    prompts: dict[str, float] = {}
    of_prompts_only = set(STEP_QUANTITIES) - {"steps", *PROMPT_STEP_QUANTITIES}
    for name in product_names(STEP_QUANTITIES):
        first, _, second = name.partition("*")
        if first == "steps":  # 1 in each step, as `prompt_steps` in one with prompts
            other = "prompt_steps" if second == "steps" else second
            prompts[name] = sums.get(prompt_step_product(other), 0.0)
        elif of_prompts_only & {first, second}:
            prompts[name] = sums.get(name, 0.0)
        else:
            prompts[name] = sums.get(prompt_step_product(name), 0.0)
        decodes[name] = sums.get(name, 0.0) - prompts[name]
    return decodes, prompts


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
