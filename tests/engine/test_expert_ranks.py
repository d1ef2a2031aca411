"""Data and expert parallelism of models with experts: ranks compute in step, on either side.

vLLM's CPU build lacks parts of it; `steady/wide_ep.py` stands in for them, in the plain engine too.
In float32: two ranks batch differently from one engine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from asking import (
    Body,
    Record,
    ask,
    at_once,
    body,
    expect_exact_or_clean,
    expect_same,
    tokens,
)
from conftest import Machine
from direct import Legs
from engines import BLOCK, Engine, Proxy, wait
from test_models import EXACT, FLOAT32, LENGTHS, model, several

from vllm_disagg.fleet import grants

pytestmark = pytest.mark.wide

STAND_IN = {"ENGINE_CHANGES": "wide_ep"}
WITH_EXPERTS = "--enable-expert-parallel"
CASES = [(kind, experts) for kind in ("moe", "mla", "mtp") for experts in (False, True)]
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
SIDES = [(2, 0), (0, 2), (2, 2)]  # data parallel ranks of P and D


@dataclass(frozen=True)
class Case:
    """A model and the flags of its engines."""

    kind: str
    has_remote_experts: bool

    @property
    def name(self) -> str:
        return f"{self.kind}{'-ep' if self.has_remote_experts else ''}"

    def flags(self, ranks: int) -> list[str]:
        more = [WITH_EXPERTS] if self.has_remote_experts and ranks else []
        if self.kind == "mla":  # that for AMX has no float32
            more += ["--attention-backend", "CPU_MLA"]
        return [*EXACT[self.kind][1:], *FLOAT32, *more]

    def engine(self, machine: Machine, name: str, ranks: int, *, cpu: str, role: str) -> Engine:
        return Engine(
            f"{self.name}-{name}{ranks}",
            machine.folder,
            *self.flags(ranks),
            role=role,
            cpu=f"{cpu}|{cpu}" if ranks else cpu,
            ranks=ranks,
            model=model(self.kind),
            env=STAND_IN,
        )


def prompts() -> list[Body]:
    """Returns 102 requests: of all lengths, and with a common prefix."""
    common = tokens(300, "expert ranks common")
    distinct = [tokens(LENGTHS[at % len(LENGTHS)], f"expert ranks {at}") for at in range(68)]
    shared = [common + tokens(1 + 23 * at, f"expert ranks {at}") for at in range(34)]
    return [body(prompt, 16, logprobs=3) for prompt in (*distinct, *shared)]


class Plain:
    """Answers of a plain vLLM with the same flags, which ends before the pairs start."""

    def __init__(self) -> None:
        self._answers: dict[Case, list[Record]] = {}
        self.accepted: dict[Case, float] = {}  # drafted tokens

    def answers(self, machine: Machine, case: Case) -> list[Record]:
        if case not in self._answers:
            plain = case.engine(machine, "plain", 2, cpu="0", role="")
            machine.start(plain)
            asked = prompts()
            urls = [plain.urls[at % 2] for at in range(len(asked))]
            found = several(lambda one: ask(urls[asked.index(one)], one), asked)
            assert {one.status for one in found} == {200}
            self.accepted[case] = plain.metric(ACCEPTED)
            machine.stop(plain)
            self._answers[case] = found
        return self._answers[case]


class Pair:
    def __init__(self, machine: Machine, case: Case, at_p: int, at_d: int) -> None:
        self.prefill = case.engine(machine, "P", at_p, cpu="0", role="kv_producer")
        self.decode = case.engine(machine, "D", at_d, cpu="1", role="kv_consumer")
        self.proxy = Proxy(
            machine.folder, self.prefill, self.decode, name=f"{case.name}-proxy{at_p}{at_d}"
        )
        machine.start(self.prefill, self.decode)
        machine.start(self.proxy)
        members = dict.fromkeys([*self.prefill.urls, *self.decode.urls], True)
        wait("every rank is known", lambda: self.proxy.members() == members, 20)
        self.key = machine.key


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: Case(*case).name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture(scope="module", params=SIDES, ids=["P", "D", "both"])
def pair(
    machine: Machine, plain: Plain, case: Case, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    plain.answers(machine, case)
    made = Pair(machine, case, *request.param)
    yield made
    machine.stop()


def by_rank(engine: Engine, name: str) -> list[float]:
    return [engine.metric(name, f'engine="{rank}"') for rank in range(max(1, engine.ranks))]


def wait_until_free(engine: Engine) -> None:
    """Waits until an engine holds no blocks.

    With two API servers the gauge is that of the last one to hear of a step, perhaps of an earlier
    step than the other heard of. A request to each rank renews it.
    """

    def is_free() -> bool:
        for url in engine.urls:
            assert ask(url, body([1, 2, 3], 1)).status == 200
        return engine.usage == 0

    wait(f"{engine.name} gives all its blocks back", is_free, 15)


def ask_while_it_dies(url: str, asked: list[Body], victim: int) -> list[Record]:
    """Returns the answers to requests at the same time as a process, by its id, is killed."""

    def one_answer(at: int) -> Record:
        if at == len(asked):
            time.sleep(0.5)  # some requests run, and none has all of its tokens
            os.kill(victim, signal.SIGKILL)
            return Record(0)
        try:
            return ask(url, asked[at], timeout=60.0)
        except ConnectionError as error:
            return Record(599, error=f"error: {error}")

    return at_once(one_answer, range(len(asked) + 1))[: len(asked)]


def test_answers_are_plain_vllms_and_every_rank_takes_part(
    machine: Machine, plain: Plain, case: Case, pair: Pair
) -> None:
    asked = prompts()
    ours = several(lambda one: ask(pair.proxy.url, one), asked)
    for one, expected, what in zip(ours, plain.answers(machine, case), asked, strict=True):
        expect_same(one, expected, f"{len(what['prompt'])} tokens:")
    assert all(by_rank(pair.prefill, "vllm:disagg_sent_bytes_total")), "a rank of P sent nothing"
    assert all(by_rank(pair.decode, "vllm:disagg_received_bytes_total")), (
        "a rank of D received nothing"
    )
    # Wrong KV of a draft's layers shows in no token, only here.
    assert pair.decode.metric(ACCEPTED) >= 0.95 * plain.accepted[case]
    if case.kind == "mtp":
        assert plain.accepted[case] > 0
    # Its API servers count a load when they hear of a later step.
    loads = "vllm:disagg_load_seconds_count"
    wait("each prompt is loaded", lambda: pair.decode.metric(loads) >= 100, 15)
    for engine in (pair.prefill, pair.decode):
        wait_until_free(engine)
        assert engine.is_alive()
    assert pair.prefill.metric("vllm:disagg_unclaimed_prefills_total") == 0
    assert not pair.decode.metric("vllm:disagg_damaged_pieces_total")


def test_a_rank_that_waits_for_kv_stops_no_other(pair: Pair) -> None:
    """D's rank 1 waits for a prompt that P gets only after rank 0 has answered."""
    if not pair.decode.ranks:
        pytest.skip("only D waits for KV")
    legs = Legs(pair.key, pair.prefill, pair.decode, d_rank=1)
    asked = body(tokens(3 * BLOCK, time.monotonic()), 8)
    busy = body(tokens(100, time.monotonic()), 60, ignore_eos=True)
    transfer = grants.new_transfer()
    waiting = legs.send_decode(asked, transfer)
    began = time.monotonic()
    alone = ask(pair.decode.urls[0], busy)
    seconds = time.monotonic() - began
    assert alone.status == 200 and alone.usage[1] == 60
    assert not waiting.done(), f"it waited no longer than {seconds:.1f} s"
    assert legs.send_prefill(asked, transfer).result().status == 200
    expect_same(waiting.result(), ask(pair.decode.urls[0], asked))
    legs.close()


def test_a_rank_that_dies(machine: Machine, plain: Plain, case: Case, pair: Pair) -> None:
    """First one of P, with which all of P ends, then one of D: each answer is EXACT or CLEAN."""
    asked = prompts()[:24]
    right = plain.answers(machine, case)
    for engine in (pair.prefill, pair.decode):
        if not engine.ranks:
            continue
        salted = [{**one, "cache_salt": engine.name} for one in asked]
        found = ask_while_it_dies(pair.proxy.url, salted, engine.child("EngineCore_DP1"))
        for one, expected in zip(found, right, strict=False):
            expect_exact_or_clean(one, expected)
        wait(f"vLLM ends {engine.name}", lambda e=engine: not e.is_alive(), 60)  # type: ignore[misc]
