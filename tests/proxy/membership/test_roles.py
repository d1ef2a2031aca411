"""`--roles auto`: roles of scripted engines follow what their metrics pages report."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from proxy_world import KEY, Call, World, until, world
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet.role_control import RoleRules
from vllm_disagg.product_sums import (
    STEP_QUANTITIES,
    ProductSums,
    product_names,
    step_product_names,
    steps_of_both_kinds,
)
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy import flags, serving
from vllm_disagg.proxy.membership import roles
from vllm_disagg.proxy.membership.members import Members
from vllm_disagg.proxy.membership.reconcile import Member
from vllm_disagg.proxy.membership.roles import RoleKeeper
from vllm_disagg.proxy.membership.step_profiles import StepProfiles
from vllm_disagg.proxy.routing.fleet import Fleet, Instance, Role
from vllm_disagg.proxy.settings import ProxySettings
from vllm_disagg.proxy.telemetry.metrics import LatencyObjectives, Metrics
from vllm_disagg.proxy.workers.bus import WorkerPlace

OBJECTIVES = LatencyObjectives(1.0, 0.05)
BASE, PROMPT, TOKEN, SEQUENCE = 0.01, 0.002, 1e-4, 0.001  # seconds of the scripted steps


class Steps:
    """Scripted sums of an engine's steps, as its metrics page states them.

    `names`: of the sums; an engine of an older release has fewer.
    """

    def __init__(self, names: Sequence[str] = tuple(step_product_names())) -> None:
        self._decodes = ProductSums(STEP_QUANTITIES)
        self._prompts = ProductSums(STEP_QUANTITIES)
        self._total: dict[str, float] = dict.fromkeys(names, 0.0)

    def prompt(self, tokens: int, factor: float = 1.0) -> None:
        seconds = factor * (BASE + PROMPT + TOKEN * tokens)
        self._prompts.add((1, 1, tokens, tokens**2, 0, 0, seconds))

    def answer(self, sequences: int, factor: float = 1.0) -> None:
        seconds = factor * (BASE + SEQUENCE * sequences)
        self._decodes.add((1, 0, 0, 0, sequences, 100 * sequences, seconds))

    def lines(self, engine: int = 0) -> list[str]:
        taken = steps_of_both_kinds(self._decodes.take(), self._prompts.take())
        for name in self._total.keys() & taken.keys():
            value = taken[name]
            self._total[name] = self._total.get(name, 0.0) + value
        found = [
            f'vllm:disagg_step_sums_total{{engine="{engine}",model_name="m",product="{name}"}}'
            f" {value}"
            for name, value in self._total.items()
        ]
        blocks = 'block_size="16",num_gpu_blocks="1000"'
        return [*found, f'vllm:cache_config_info{{{blocks},engine="{engine}"}} 1.0']

    def page(self, engine: int = 0) -> bytes:
        return "\n".join(self.lines(engine)).encode() + b"\n"


def busy(steps: Steps, seconds: float, prompts: bool, sequences: int = 60) -> None:
    """Adds the steps of so many seconds, of different sizes."""
    spent = 0.0
    turn = 0
    while spent < seconds:
        turn += 1
        if prompts:
            tokens = 500 + 100 * (turn % 5)
            steps.prompt(tokens)
            spent += BASE + PROMPT + TOKEN * tokens
        else:
            count = sequences + turn % 3
            steps.answer(count)
            spent += BASE + SEQUENCE * count


def test_load_and_steps_come_from_the_engines_sums() -> None:
    profiles = StepProfiles()
    p, d = Steps(), Steps()
    for second in range(0, 20, 2):
        profiles.on_metrics_read("p", None, p.page(), float(second))
        profiles.on_metrics_read("d", None, d.page(), float(second))
        busy(p, 1.0, prompts=True)
        busy(d, 2.0, prompts=False)
    load = profiles.load(["p", "d"], 18.0)
    assert load.prefill_work == pytest.approx(0.5, rel=0.1)
    assert load.sequences == pytest.approx(61, rel=0.05)
    assert load.contexts == pytest.approx(6100, rel=0.05)
    assert load.kv_tokens == 16_000
    assert load.steps
    assert load.steps.decode_step(30, 3000) == pytest.approx(BASE + SEQUENCE * 30, rel=0.02)
    # An engine that has left takes its load with it; the steps are known.
    gone = profiles.load(["p"], 18.0)
    assert gone.sequences == 0
    assert gone.steps


def noisy(steps: Steps, chance: random.Random) -> None:
    """Adds steps of few sequences, and of prompts a hundred times as long."""
    for _ in range(40):
        steps.answer(chance.choice((1, 2)), chance.lognormvariate(0, 0.05))
    for _ in range(10):
        steps.prompt(chance.randrange(1000, 20_000), chance.lognormvariate(0, 0.6))


def test_the_noise_of_prompts_hides_no_growth_of_decodes() -> None:
    for seed in range(3, 6):
        chance = random.Random(seed)
        profiles = StepProfiles()
        steps = Steps()
        for second in range(0, 60, 2):
            profiles.on_metrics_read("e", None, steps.page(), float(second))
            noisy(steps, chance)
        found = profiles.load(["e"], 58.0).steps
        assert found
        assert found.decode_step(30, 3000) == pytest.approx(BASE + SEQUENCE * 30, rel=0.25)


def test_engines_of_an_older_release_are_fitted_with_others() -> None:
    """All steps then weigh the same: theirs with prompts are not told from others."""
    profiles = StepProfiles()
    engines = {"new": Steps(), "old": Steps(product_names(STEP_QUANTITIES))}
    for second in range(0, 20, 2):
        for url, steps in engines.items():
            profiles.on_metrics_read(url, None, steps.page(), float(second))
            busy(steps, 1.0, prompts=True)
            busy(steps, 1.0, prompts=False)
    found = profiles.load(list(engines), 18.0).steps
    assert found
    assert found.decode_step(30, 3000) == pytest.approx(BASE + SEQUENCE * 30, rel=0.02)


def test_a_restarted_engine_begins_anew() -> None:
    profiles = StepProfiles()
    steps = Steps()
    busy(steps, 50.0, prompts=True)
    profiles.on_metrics_read("p", None, steps.page(), 0.0)
    fresh = Steps()
    busy(fresh, 0.1, prompts=True)
    profiles.on_metrics_read("p", None, fresh.page(), 2.0)
    assert profiles.load(["p"], 2.0).prefill_work == 0


def test_a_rank_has_its_own_sums() -> None:
    profiles = StepProfiles()
    first, second = Steps(), Steps()
    for now in (0.0, 10.0):
        page = first.page(0) + second.page(1)
        for rank in (0, 1):
            profiles.on_metrics_read(f"u@{rank}", rank, page, now)
        busy(second, 5.0, prompts=True)
    page = first.page(0) + second.page(1)
    for rank in (0, 1):
        profiles.on_metrics_read(f"u@{rank}", rank, page, 20.0)
    assert profiles.load(["u@0"], 20.0).prefill_work == 0
    profiles = StepProfiles()
    assert profiles.load(["u@1"], 20.0).steps is None


def test_a_load_that_is_no_more_read_is_forgotten() -> None:
    profiles = StepProfiles()
    steps = Steps()
    for second in range(0, 20, 2):
        profiles.on_metrics_read("d", None, steps.page(), float(second))
        busy(steps, 2.0, prompts=False)
    assert profiles.load(["d"], 28.0).sequences > 50
    old = profiles.load(["d"], 60.0)
    assert old.sequences == 0
    assert old.steps


@pytest.mark.parametrize("value", ["+Inf", "NaN", "-Inf", "1e400"])
def test_sums_that_are_not_finite_are_not_read(value: str) -> None:
    profiles = StepProfiles()
    p, d = Steps(), Steps()
    for second in range(0, 20, 2):
        profiles.on_metrics_read("p", None, p.page(), float(second))
        page = re.sub(rb'("contexts.seconds"} )\S+', rb"\g<1>" + value.encode(), d.page())
        assert second == 0 or value.encode() in page
        profiles.on_metrics_read("d", None, page, float(second))
        busy(p, 1.0, prompts=True)
        busy(d, 2.0, prompts=False)
    load = profiles.load(["p", "d"], 18.0)
    assert load.prefill_work == pytest.approx(0.5, rel=0.1)
    assert load.contexts == 0
    assert load.steps


def member(url: str, role: Role, engine_role: Any = "both", layout: str = "m") -> Instance:
    instance = Instance(url, role)
    answered(instance, engine_role, layout)
    return instance


def answered(
    instance: Instance, engine_role: Any = "both", layout: str = "m", model: str = "m"
) -> None:
    worker = WorkerInfo(instance.url, "a", "b")
    engine = EngineInfo(instance.url, engine_role, [worker], {"model": layout})
    instance.on_probe_answered(model, engine)


class Kept:
    """A keeper over scripted engines, and the changes that it made."""

    def __init__(self, *instances: Instance) -> None:
        self.fleet = Fleet(list(instances))
        self.changes: list[tuple[float, str, Role]] = []
        self.wanted: dict[str, int] = {}
        self.told: dict[str, Role] | None = None
        self.steps = {instance.url: Steps() for instance in instances}
        self.now = 0.0
        rules = RoleRules(OBJECTIVES.ttft, OBJECTIVES.tpot)
        self.waiting_work: Callable[[], float] = lambda: 0.0
        self.keeper = RoleKeeper(
            self.fleet, rules, lambda: self.waiting_work(), self._set_roles, self.wanted
        )

    def _set_roles(self, roles: dict[str, Role]) -> None:
        self.told = roles
        for instance in self.fleet.instances:
            role = roles.get(instance.url, instance.named_role)
            if role != instance.role:
                self.changes.append((self.now, instance.url, role))
                instance.role = role

    def run(self, seconds: float, load: Callable[[Instance, Steps], None]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            for instance in self.fleet.instances:
                load(instance, self.steps[instance.url])
                page = self.steps[instance.url].page()
                self.keeper.on_metrics_read(instance, page, self.now)
            self.keeper.observe(self.now)

    def roles(self) -> str:
        return "".join(instance.role[0] for instance in self.fleet.instances)


def prompt_heavy(instance: Instance, steps: Steps) -> None:
    busy(steps, 2.0, instance.role == "prefill", sequences=2)


def answer_heavy(instance: Instance, steps: Steps) -> None:
    if instance.role == "prefill":
        busy(steps, 0.1, prompts=True)
    else:
        busy(steps, 2.0, prompts=False, sequences=60)


def test_roles_follow_what_engines_report() -> None:
    kept = Kept(*(member(f"http://i{n}", "prefill" if not n else "decode") for n in range(4)))
    kept.waiting_work = lambda: kept.now  # prompts come that they have no time for
    kept.run(60, prompt_heavy)
    assert kept.roles().count("p") > 1
    assert kept.wanted["prefill"] > 1
    kept.waiting_work = lambda: 0.0
    turned_at = kept.now
    kept.run(60, answer_heavy)
    assert kept.roles().count("p") == 1
    assert min(at for at, _, role in kept.changes if role == "decode") - turned_at < 30


def test_engines_of_one_role_keep_it() -> None:
    fixed = [member("http://p", "prefill", "prefill"), member("http://d", "decode", "decode")]
    kept = Kept(*fixed, member("http://e", "decode", "decode"))
    kept.run(60, prompt_heavy)
    assert kept.changes == []


def test_several_models_keep_their_roles(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(
        member("http://p", "prefill"),
        member("http://d", "decode"),
        member("http://e", "decode"),
        member("http://f", "decode", layout="other"),
    )
    kept.run(60, prompt_heavy)
    assert kept.changes == []
    assert caplog.text.count("2 kinds of KV cache") == 1


def test_another_model_beside_keeps_the_roles(caplog: pytest.LogCaptureFixture) -> None:
    """A decode instance of another model is none that could take the place of the members' own."""
    other = Instance("http://other", "decode")
    answered(other, "decode", "o", "o")
    kept = Kept(member("http://p", "prefill"), member("http://d", "decode"), other)
    kept.run(60, prompt_heavy)
    assert kept.changes == []
    assert caplog.text.count("http://other serves another model") == 1


def test_prefill_instances_that_fit_no_member_do_not_count() -> None:
    fixed = member("http://f", "prefill", "prefill", layout="other")
    kept = Kept(fixed, *(member(f"http://i{n}", "decode") for n in range(2)))
    kept.run(2, lambda *_: None)
    assert kept.roles()[1:].count("p") == 1


def test_an_instance_that_still_starts_is_awaited() -> None:
    starting = Instance("http://p", "prefill")
    kept = Kept(starting, *(member(f"http://i{n}", "decode") for n in range(2)))
    kept.run(20, lambda *_: None)
    assert kept.changes == []
    answered(starting)
    kept.run(60, lambda *_: None)
    assert kept.changes == []
    starting.mark_down("dead")  # it has answered once
    kept.run(2, lambda *_: None)
    assert kept.roles()[1:].count("p") == 1


def test_an_instance_that_never_starts_is_not_awaited_for_ever() -> None:
    kept = Kept(Instance("http://d", "decode"), member("http://p", "prefill"))
    kept.run(40, lambda *_: None)
    assert [(url, role) for _, url, role in kept.changes] == [("http://p", "decode")]
    assert 30 <= kept.changes[0][0] <= 34


def test_an_engine_that_is_started_for_one_role_has_the_named_one() -> None:
    instance = member("http://p", "prefill")
    instance.take_role("decode")
    answered(instance)
    assert instance.role == "decode"
    answered(instance, "prefill")
    assert (instance.role, instance.unavailable_reason) == ("prefill", "")
    instance.take_role("decode")
    assert instance.role == "prefill"
    answered(instance, "decode")
    assert (
        "is given as --prefill, but its connector's role is decode" in instance.unavailable_reason
    )


def observe_each(monkeypatch: pytest.MonkeyPatch, seconds: float, start: float = 0.0) -> None:
    monkeypatch.setattr(roles, "START_SECONDS", start)
    monkeypatch.setattr(roles, "OBSERVATION_SECONDS", seconds)


async def test_instances_of_slow_sources_keep_the_roles_that_a_new_worker_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observe_each(monkeypatch, 0.001, start=0.2)
    kept = Kept(member("http://p", "prefill"), member("http://e", "decode"))
    running = asyncio.create_task(kept.keeper.run())
    await asyncio.sleep(0.05)
    assert kept.told is None, "it would make the others forget the role of http://d"
    kept.fleet.instances = [*kept.fleet.instances, member("http://d", "decode")]
    kept.fleet.instances[2].role = "prefill"
    await until(lambda: kept.told is not None)
    running.cancel()
    assert kept.told == {"http://d": "prefill"}


async def test_a_fault_of_the_controller_keeps_the_roles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    observe_each(monkeypatch, 0.001)
    kept = Kept(member("http://p", "prefill"), member("http://d", "decode"))
    kept.fleet.instances[1].role = "prefill"

    def fail() -> float:
        raise ValueError("scripted")

    kept.waiting_work = fail
    running = asyncio.create_task(kept.keeper.run())
    await until(lambda: len(caplog.records) > 1)
    assert not running.done()
    running.cancel()
    assert "all instances keep their roles" in caplog.text and "scripted" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    # Other workers get them all the same.
    assert kept.told == {"http://d": "prefill"}


def test_the_last_decode_instance_is_replaced_at_once() -> None:
    kept = Kept(*(member(f"http://i{n}", "prefill" if n < 2 else "decode") for n in range(3)))
    kept.fleet.instances[2].mark_down("dead")
    kept.run(2, lambda *_: None)
    assert kept.roles()[:2].count("d") == 1


# -- a proxy ---------------------------------------------------------------------------------------


def both(w: World) -> None:
    for engine in w.prefills + w.decodes:
        engine.role = "both"


async def by_url(w: World) -> dict[str, Any]:
    return {row["url"]: row for row in await w.instances()}


async def test_a_role_changes_while_answers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode instance becomes one for prefill: its running answer ends where it is."""
    observe_each(monkeypatch, 0.02)
    settings: dict[str, Any] = {"roles": "auto", "objectives": OBJECTIVES}
    async with world(prefill=1, decode=2, prepare=both, **settings) as w:
        release = asyncio.Event()

        async def slow(call: Call) -> None:
            await call.stream()
            await call.event({"text": "a"})
            await release.wait()
            await call.event("[DONE]")
            await call.end()

        for engine in w.decodes:
            engine.script = slow
        clients = [await w.start(stream=True) for _ in range(2)]
        await until(lambda: all(engine.legs("decode") for engine in w.decodes))
        # The only prefill instance dies: the controller replaces it at once.
        await w.p.stop()

        async def is_replaced() -> bool:
            rows = await by_url(w)
            found = [rows[engine.url]["role"] for engine in w.decodes]
            return sorted(found) == ["decode", "prefill"]

        await until(is_replaced)
        rows = await by_url(w)
        assert {row["connector_role"] for row in rows.values()} == {"both"}
        release.set()
        replies = [await client.receive() for client in clients]
        assert [reply.status for reply in replies] == [200, 200]
        assert all(reply.events()[-1] == "[DONE]" for reply in replies)
        turned = next(e for e in w.decodes if rows[e.url]["role"] == "prefill")
        other = next(e for e in w.decodes if e is not turned)

        async def answer(call: Call) -> None:
            if call.leg == "prefill" and call.grant:
                params = {"disagg_engine": call.engine.facts(call.rank)}
                await call.json({"choices": [{"text": "x"}], "kv_transfer_params": params})
            else:
                await call.json({"text": call.engine.name})

        turned.script = other.script = answer
        assert json.loads((await w.post()).body) == {"text": other.name}
        assert turned.legs("prefill")


def in_members(check: Callable[[Fleet, Members], None]) -> None:
    """Runs a check of a fleet's members that follow no real instance."""
    fleet = Fleet()
    no_pool: Any = NoPool()
    members = Members(fleet, {}, lambda *_: no_pool, lambda _: asyncio.sleep(60), lambda: None)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            sweep = members.start(tasks)
            check(fleet, members)
            sweep.cancel()
            members.close()

    asyncio.run(run())


D, E = Member("http://d", "decode"), Member("http://e", "decode")


def test_a_role_is_known_before_its_instance_joins() -> None:
    """A worker that starts late may hear of a change before it finds the instance."""

    def check(fleet: Fleet, members: Members) -> None:
        members.set_roles({"http://d": "prefill"})
        members.set("dns", [D, E])
        assert [i.role for i in fleet.instances] == ["prefill", "decode"]
        assert members.role("http://d") == "decode"
        members.set("dns", [E])
        assert [i.url for i in fleet.leaving] == ["http://d"]

    in_members(check)


def test_an_instance_that_is_named_again_has_its_present_role() -> None:
    def check(fleet: Fleet, members: Members) -> None:
        members.set("dns", [D, E])
        members.set("dns", [E])
        members.set_roles({"http://d": "prefill"})
        members.set("dns", [D, E])
        assert {i.url: i.role for i in fleet.instances} == {
            "http://d": "prefill",
            "http://e": "decode",
        }

    in_members(check)


def test_a_role_of_which_the_first_worker_has_forgotten_is_the_named_one() -> None:
    """Its instance has left there, and is named again, while it never left here."""

    def check(fleet: Fleet, members: Members) -> None:
        members.set("dns", [D, E])
        members.set_roles({"http://d": "prefill", "http://gone": "prefill"})
        members.set_roles({"http://e": "prefill"})
        assert [i.role for i in fleet.instances] == ["decode", "prefill"]
        assert members._roles == {"http://e": "prefill"}

    in_members(check)


def test_the_first_worker_tells_all_roles_that_are_not_the_named_ones() -> None:
    kept = Kept(
        member("http://p", "prefill"), *(member(f"http://i{n}", "decode") for n in range(2))
    )
    kept.fleet.instances[1].role = "prefill"
    leaves = member("http://l", "decode")
    leaves.role = "prefill"
    kept.fleet.leaving.append(leaves)
    kept.keeper.observe(2.0)
    assert kept.told == {"http://i0": "prefill", "http://l": "prefill"}


class NoPool:
    """Stands for a pool of connections that is never used."""

    def close(self) -> None:
        pass


class Recorder:
    """Stands for the parts that get the roles."""

    def __init__(self) -> None:
        self.told: list[dict[str, Role]] = []
        self.on_metrics_read: Any = lambda *_: None

    def set_roles(self, roles: dict[str, Role]) -> None:
        self.told.append(roles)

    broadcast_roles = set_roles

    def backlog_seconds(self) -> float:
        return 0.0


async def test_the_first_worker_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    observe_each(monkeypatch, 0.001)
    fleet = Fleet([member("http://a", "decode"), member("http://b", "decode")])
    members, bus, other = Recorder(), Recorder(), Recorder()

    def tasks(index: int) -> list[Any]:
        settings = ProxySettings(
            prefill=[],
            decode=[],
            key=KEY,
            roles="auto",
            objectives=OBJECTIVES,
            place=WorkerPlace(index, 2, 0, 0, 0, ""),
        )
        parts: list[Any] = [fleet, other, Metrics(fleet), members, bus, other]
        return list(serving._role_tasks(settings, *parts))

    assert tasks(1) == []
    (keeping,) = tasks(0)
    running = asyncio.create_task(keeping)
    await until(lambda: bus.told)
    running.cancel()
    assert members.told[0] == bus.told[0] == {"http://a": "prefill"}


async def test_fixed_roles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    observe_each(monkeypatch, 0.02)
    async with world(prefill=1, decode=2, prepare=both) as w:
        await w.p.stop()
        await until(lambda: _is_down(w))
        await asyncio.sleep(0.2)
        assert [row["role"] for row in await w.instances()] == ["prefill", "decode", "decode"]
        assert "wanted_instances{" not in (await w.get("/metrics")).body.decode()


async def _is_down(w: World) -> bool:
    return not (await by_url(w))[w.p.url]["usable"]


async def test_a_changed_role_is_no_change_of_membership() -> None:
    """A member named by a flag stays, whatever role it has now; the admin API knows its own."""
    async with world(prefill=1, decode=2, prepare=both, admin_key="root") as w:
        headers = {"authorization": "Bearer root", "content_type": "application/json"}
        body = json.dumps({"url": w.d.url, "role": "prefill"}).encode()
        assert (await w.ask("POST", "/disagg/instances", body, **headers)).status == 409


async def test_a_member_stays_after_its_role_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    observe_each(monkeypatch, 0.02)
    settings: dict[str, Any] = {"roles": "auto", "objectives": OBJECTIVES, "admin_key": "root"}
    async with world(prefill=1, decode=2, prepare=both, **settings) as w:
        await w.p.stop()

        async def is_replaced() -> bool:
            return [row["role"] for row in await w.instances()].count("prefill") == 2

        await until(is_replaced)
        headers = {"authorization": "Bearer root", "content_type": "application/json"}
        # Any change of the fleet settles its membership anew.
        body = json.dumps({"url": "http://127.0.0.1:9", "role": "decode"}).encode()
        assert (await w.ask("POST", "/disagg/instances", body, **headers)).status == 200
        assert not any(row["leaving"] for row in await w.instances())


def test_auto_needs_the_objectives_that_it_serves() -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    for words, named in (
        (["--roles", "auto"], "--objective-ttft"),
        (["--roles", "auto", "--objective-ttft", "1"], "--objective-tpot"),
    ):
        with pytest.raises(ConfigError, match=named):
            flags.check_roles(parser.parse_args(words))
    flags.check_roles(parser.parse_args([]))
