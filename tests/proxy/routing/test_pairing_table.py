"""A fleet compared by compatibility keys, beside the same fleet compared pair by pair."""

from __future__ import annotations

import random

import pytest

from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.routing import pairing_table
from vllm_disagg.proxy.routing.fleet import Fleet, Instance, Role, mismatch
from vllm_disagg.proxy.routing.pairing_table import PairingTable

ROLES: tuple[Role, ...] = ("prefill", "decode")


def instance(number: int, role: Role, engine: int, version: str, release: str = "") -> Instance:
    made = Instance(f"http://{role}{number}", role)
    worker = WorkerInfo(f"worker{engine}", "tcp://a:1", "tcp://a:2")
    layout = {"vllm": version}
    made.on_probe_answered("m", EngineInfo(f"{engine}", "both", [worker], layout, release=release))
    return made


def random_fleet(seed: int) -> Fleet:
    """Returns a fleet of engines of some versions, some down, plain or under two names."""
    draw = random.Random(seed)
    fleet = Fleet()
    for number in range(draw.randrange(12)):
        made = instance(
            number, draw.choice(ROLES), draw.randrange(8), draw.choice("abc"), draw.choice("12")
        )
        if draw.random() < 0.2:
            made.on_probe_answered("m", None, nixl=draw.random() < 0.5)
        if draw.random() < 0.2:
            made.mark_down("is silent")
        fleet.instances.append(made)
    return fleet


def pairwise(prefill: Instance, decode: Instance) -> str:
    for made in (prefill, decode):
        if not made.can_transfer:
            return f"{made.url} {made.unavailable_reason}"
    return mismatch(prefill, decode)


@pytest.mark.parametrize("seed", range(50))
def test_the_table_says_what_each_pair_says(seed: int) -> None:
    fleet = random_fleet(seed)
    table = PairingTable(fleet)
    up = [i for i in fleet.instances if i.up]
    fits = 0
    for one in up:
        others = [other for other in up if other.role != one.role]
        pairs = [(one, o) if one.role == "prefill" else (o, one) for o in others]
        reasons = {o.url: pairwise(*pair) for o, pair in zip(others, pairs, strict=True)}
        assert {o.url for o in table.fitting(one)} == {u for u, why in reasons.items() if not why}
        assert {o.url: why for o, why in table.misfits(one)} == {
            url: why for url, why in reasons.items() if why
        }
        able = [o for o in others if o.can_transfer]
        has_problem = one.can_transfer and bool(able) and all(reasons[o.url] for o in able)
        assert bool(table.problem(one)) == has_problem
        if has_problem:
            assert table.problem(one).endswith(f" do not fit: {reasons[able[0].url]}")
        fits += len(table.fitting(one))
    assert table.working_pairs() == fits / 2
    for prefill, decode in table.misfit_examples():
        assert pairwise(prefill, decode)


def test_layouts_are_compared_once_for_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of 500 and 500 spent most of its time on this amid a roll-out."""
    calls = 0

    def counted(prefill: Instance, decode: Instance) -> str:
        nonlocal calls
        calls += 1
        return mismatch(prefill, decode)

    monkeypatch.setattr(pairing_table, "mismatch", counted)
    made = [instance(n, "prefill", n, "ab"[n % 2]) for n in range(20)]
    made += [instance(n, "decode", 100 + n, "c") for n in range(20)]
    table = PairingTable(Fleet(made))
    assert all(table.problem(i) for i in made) and table.permanent_mismatch()
    assert all(len(list(table.misfits(i))) == 20 for i in made)
    assert len(list(table.misfit_examples())) == 2
    assert calls == 2
