"""The predicted time of a prefill leg."""

from vllm_disagg.proxy.routing.prefill_times import PROMPTS, PrefillTimes


def test_the_least_of_the_last_prompts_of_about_this_size_counts() -> None:
    times = PrefillTimes()
    assert times.least(8000) == 0.0
    times.add(8000, 1.0)
    times.add(8100, 3.0)
    times.add(16_000, 0.2)
    assert times.least(8050) == 1.0 and times.least(16_000) == 0.2 and times.least(4000) == 0.0
    for _ in range(PROMPTS):
        times.add(8000, 2.0)
    assert times.least(8000) == 2.0


def test_the_smallest_prompt_has_a_size() -> None:
    times = PrefillTimes()
    times.add(1, 0.5)
    assert times.least(1) == 0.5
