"""Microseconds that the connector takes for one step's composition and sums."""

from __future__ import annotations

import json
import timeit
from types import SimpleNamespace
from typing import Any

COST_STEPS = 200  # of one timing: few, so that some run without another process
STEP_SHAPES = ((1, 0), (64, 0), (256, 0), (64, 1), (256, 2))  # sequences, prompts


def print_cost() -> int:
    """Prints the microseconds that a step's profile takes, by the step's shape."""
    from kv_connectors.step_profile import StepProfile  # noqa: PLC0415 - it needs vLLM

    worst = 0.0
    for sequences, prompts in STEP_SHAPES:
        output: Any = scheduled(sequences, prompts)
        profile = StepProfile()
        profile.on_arrived("request", 0.0, 0.0)
        clock = iter(range(1 << 40))

        def step(profile: StepProfile = profile, output: Any = output, clock: Any = clock) -> None:
            now = 0.01 * next(clock)
            profile.on_scheduled(output)
            profile.on_step_ended(now)
            profile.take(now)

        best = min(timeit.repeat(step, number=COST_STEPS, repeat=100)) / COST_STEPS * 1e6
        worst = max(worst, best)
        print(f"{sequences:4} sequences, {prompts} prompts: {best:5.1f} us a step")
    print(json.dumps({"step_profile_us_worst": round(worst, 1)}))
    return 0


def scheduled(sequences: int, prompts: int) -> SimpleNamespace:
    """Returns vLLM's output of a step of this shape."""
    ids = [f"cmpl-{number:032x}-0" for number in range(sequences)]
    new = [SimpleNamespace(req_id=f"cmpl-new-{n}", num_computed_tokens=0) for n in range(prompts)]
    counts = dict.fromkeys(ids, 1) | {request.req_id: 512 for request in new}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=[1000] * sequences),
    )
