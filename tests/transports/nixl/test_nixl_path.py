"""Tests of the probe: which paths it proves, and which only look one-sided."""

from __future__ import annotations

import random

from vllm_disagg.transports.nixl import notes
from vllm_disagg.transports.nixl.path import (
    LARGE_READS,
    MAX_PROBE_TRIES,
    QUIET_SECONDS,
    UNAIDED_READ_SECONDS,
    OneSidedProbe,
    ProbeAction,
    ProbeStep,
)


class Other:
    """A sender whose reads are one-sided or emulated; other receivers may ask it for help."""

    def __init__(self, emulated: bool, others: float = 0.0, seed: int = 0, starts: int = 0) -> None:
        self.emulated, self.others, self.random = emulated, others, random.Random(seed)
        self.count, self.until = 0, -1.0
        self.starts = starts  # reads that need help all the same: the end of a connection coming up

    def work(self, now: float) -> None:
        if now < self.until or self.random.random() < self.others:
            self.count += 1


def run(other: Other, seconds: float = 60.0, lost: float = 0.0) -> OneSidedProbe:
    probe, now, began, counted, chance = OneSidedProbe(0.0), 0.0, None, 0, random.Random(1)
    while now < seconds and probe.step not in (ProbeStep.PROVED, ProbeStep.EMULATED):
        now += 0.01
        other.work(now)
        if began is not None:
            needs_hands = other.emulated or probe.step is ProbeStep.CONNECTING or other.starts > 0
            if not needs_hands or other.count > counted:
                other.starts -= probe.step is ProbeStep.READING and other.starts > 0
                probe.read_ended(now, now - began)
                began = None
            elif probe.needs_help(now - began):
                probe.help_asked()
                other.until = now + 0.3
        while began is None and (do := probe.next(now)) is not None:
            if do is ProbeAction.ASK_COUNT:
                if chance.random() >= lost:
                    probe.on_count(probe.turn, other.count, now)
                continue
            began, counted = now, other.count
    return probe


def test_a_one_sided_path_is_proved() -> None:
    probe = run(Other(emulated=False))
    assert probe.step is ProbeStep.PROVED and probe.best_seconds <= 0.011 and probe.tries == 0


def test_the_end_of_a_connection_coming_up_is_not_emulation() -> None:
    assert run(Other(emulated=False, starts=MAX_PROBE_TRIES - 1)).step is ProbeStep.PROVED


def test_lost_answers_are_requested_again() -> None:
    assert run(Other(emulated=False), lost=0.6).step is ProbeStep.PROVED


def test_an_emulated_path_is_never_proved() -> None:
    """Whatever other receivers make the sender's UCX do meanwhile, and however often."""
    assert run(Other(emulated=True)).step is ProbeStep.EMULATED
    for seed in range(100):
        probe = run(
            Other(
                emulated=True,
                others=random.Random(seed).choice([0.0, 0.01, 0.1, 0.5, 1.0]),
                seed=seed,
            )
        )
        assert probe.step is not ProbeStep.PROVED, seed


def test_help_for_other_receivers_proves_nothing() -> None:
    assert run(Other(emulated=False, others=1.0)).step not in (ProbeStep.PROVED, ProbeStep.EMULATED)
    assert run(Other(emulated=False, others=0.02), 600).step is ProbeStep.PROVED


def test_a_late_answer_is_ignored() -> None:
    probe = OneSidedProbe(0.0)
    assert probe.next(0.0) is ProbeAction.READ_SMALL
    probe.read_ended(0.1, 0.1)
    assert probe.next(0.1) is None
    assert probe.next(0.1 + QUIET_SECONDS) is ProbeAction.ASK_COUNT
    probe.on_count(probe.turn - 1, 7, 1.0)
    assert probe.step is ProbeStep.COUNTING
    probe.on_count(probe.turn, 7, 1.0)
    asked = [probe.next(1.0)]
    for _ in range(LARGE_READS):
        probe.read_ended(1.0, UNAIDED_READ_SECONDS / 2)
        asked.append(probe.next(1.0))
    assert asked == [ProbeAction.READ_SMALL, *[ProbeAction.READ_LARGE] * LARGE_READS]
    probe.read_ended(1.0, UNAIDED_READ_SECONDS / 4)
    assert (
        probe.next(1.0) is ProbeAction.ASK_COUNT and probe.best_seconds == UNAIDED_READ_SECONDS / 4
    )
    probe.on_count(probe.turn, 8, 1.0)
    assert probe.step is ProbeStep.QUIET and probe.tries == 0


def test_a_small_read_takes_both_ends_of_each_registration() -> None:
    """KV may be where CUDA exports nothing, or the first part only, unlike the test region."""
    nonce = notes.NONCE_BYTES
    test = (9 << 20, notes.TEST_REGION_BYTES)
    info = notes.AgentInfo("a#1", b"", [(4096, 1 << 20), (8 << 20, 8), test], test, b"n" * nonce)
    last = (test[0] + test[1] - nonce, nonce)
    large = [(4096, nonce), (4096 + (1 << 20) - nonce, nonce)]
    small = [(8 << 20, 8), (8 << 20, 8)]
    expected = [(test[0], nonce), *large, *small, (test[0], nonce), last, last]
    assert notes.sampled_runs(info).tolist() == [list(run) for run in expected]
