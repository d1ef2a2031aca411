"""Roles that follow the load: three engines of both roles, under prompts and then under answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest
from asking import Body, Record, ask, at_once, body, expect_same, repeating, tokens
from conftest import Machine
from engines import ADMIN, Engine, Proxy, get, wait

pytestmark = pytest.mark.wide

PROMPTS = [body(tokens(1500, f"prompt {at}"), 4) for at in range(8)]
ANSWERS = [body(tokens(200, f"answer {at}"), 350, ignore_eos=True) for at in range(36)]
# 128 blocks of 128 tokens: the contexts of the answers fill one engine's cache, not two's. The
# prompts come again and again, and must be computed each time.
FLAGS = ["--kv-cache-memory-bytes", str(128 * 128 * 1024), "--no-enable-prefix-caching"]
OBJECTIVES = ["--objective-ttft", "2", "--objective-tpot", "2"]
FOLLOWS_SECONDS = 180.0  # on a machine that does much else


class Fleet:
    """Three engines of both roles behind a proxy, and what a plain vLLM answers."""

    def __init__(self, machine: Machine) -> None:
        plain = Engine("plainr", machine.folder, cpu="0")
        machine.start(plain)
        asked = [*PROMPTS, *ANSWERS]
        records = at_once(lambda one: ask(plain.url, one), asked)
        self.right = {json.dumps(one): record for one, record in zip(asked, records, strict=True)}
        machine.stop(plain)
        self.engines = [
            Engine(f"both{at}", machine.folder, *FLAGS, role="kv_both", cpu=str(at % 2))
            for at in range(3)
        ]
        machine.start(*self.engines)
        first, *others = self.engines
        words = ["--roles", "auto", *OBJECTIVES]
        self.proxy = Proxy(machine.folder, first, others, *words, name="proxyr")
        machine.start(self.proxy)
        wait("the proxy uses all engines", lambda: all(self.proxy.members().values()), 60)

    def roles(self) -> str:
        """Returns the first letters of the engines' roles, in the order of `engines`."""
        rows = json.loads(get(self.proxy.url, "/disagg/instances", 5.0, ADMIN)[1])
        found = {row["url"]: row["role"][0] for row in rows}
        return "".join(found[engine.url] for engine in self.engines)


@pytest.fixture(scope="module")
def fleet(machine: Machine) -> Iterator[Fleet]:
    made = Fleet(machine)
    yield made
    machine.stop(made.proxy, *made.engines)


def test_roles_follow_and_every_answer_is_exact(fleet: Fleet) -> None:
    assert fleet.roles() == "pdd"
    found: dict[str, float] = {}
    answers: list[tuple[Body, Record]] = []

    def send(one: Body) -> None:
        answers.append((one, ask(fleet.proxy.url, one)))

    for name, asked, prefills in (("prompts", PROMPTS, 2), ("answers", ANSWERS, 1)):
        began = time.monotonic()
        before = len(answers)
        with repeating([partial(send, one) for one in asked]):
            wait(
                f"{prefills} engines prefill under {name}",
                lambda wanted=prefills: fleet.roles().count("p") == wanted,
                FOLLOWS_SECONDS,
                0.5,
            )
            found[name] = time.monotonic() - began
            # Legs that began in the old roles end beside those of the new ones.
            least = len(answers) + len(asked)
            wait(
                "each request is answered once more",
                lambda least=least: len(answers) >= least,
                FOLLOWS_SECONDS,
            )
        assert len(answers) - before >= len(asked)
    for one, record in answers:
        expect_same(record, fleet.right[json.dumps(one)], f"{one!r:.100}")
    print(f"\nroles followed {found} s after the load turned; {len(answers)} answers are exact")
    for engine in fleet.engines:
        engine.expect_alive()
    moved = sum(engine.received for engine in fleet.engines)
    assert moved > 0
    metrics = get(fleet.proxy.url, "/metrics", 10.0, ADMIN)[1]
    assert 'vllm_disagg_wanted_instances{role="decode"}' in metrics
    wait("all blocks are given back", lambda: all(e.usage == 0 for e in fleet.engines), 30)
