"""Reads what running engines measured of themselves: steps, hand-offs, waiting, KV.

An engine with our connector exports sums over its steps (`kv_connectors/step_profile.py`). Their
increases over a window give the times of its steps under its own traffic, beside its neighbours.
The path of a request outside the engines is what the other parts leave of the measured TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import ConfigError
from ..cost.hardware import MeasuredHandoff
from ..cost.latency import LinearLatency, PathDelay
from ..cost.step_fit import MIN_STEPS, StepFit, added, fit_handoffs, fit_steps
from ..search.scenario import Scenario
from .metric_page import MetricWindow

STEP_SUMS = "vllm:disagg_step_sums_total"
HANDOFF_SUMS = "vllm:disagg_handoff_sums_total"
ARRIVAL_SUMS = "vllm:disagg_arrival_sums_total"
LANDING_SUMS = "vllm:disagg_landing_sums_total"
QUEUE_SECONDS = "vllm:request_queue_time_seconds"
PREFILL_SECONDS = "vllm:request_prefill_time_seconds"
CACHE_INFO = "vllm:cache_config_info"
SLOW_RATIO = 1.25  # of an engine's steps to those of all engines of its role
MAX_STEP_ERROR = 0.25  # of a step's mean seconds, in half of their interval
MAX_MEAN_ERROR = 0.25  # of the simulated mean TTFT and TPOT, at the measured rate


class EngineWindow(msgspec.Struct, frozen=True):
    """What one engine measured in a window."""

    url: str
    seconds: float
    steps: dict[str, float]  # sums over its steps
    handoffs: dict[str, float]  # sums over its loads: how long they took
    arrivals: dict[str, float]  # sums over its new requests
    landings: dict[str, float]  # the same: how long they waited for a step
    requests: float  # with a first token in the window
    queue: float  # mean seconds of a request in vLLM's queue, before its first step
    first: float  # mean seconds from there to its first token
    kv_tokens: int

    @property
    def busy(self) -> float:
        """Share of the window in which a step ran."""
        return self.steps.get("steps*seconds", 0.0) / self.seconds

    @property
    def arrival_wait(self) -> float:
        """Mean seconds from a request's arrival until the running step ends; then vLLM sees it."""
        count = self.arrivals.get("arrivals*arrivals", 0.0)
        return self.arrivals.get("arrivals*seconds", 0.0) / count if count else 0.0


class RoleProfile(msgspec.Struct, frozen=True):
    """The step times of all engines of one role, from all their steps together."""

    engines: list[EngineWindow]
    steps: StepFit

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV of the engine that has the fewest."""
        return min(engine.kv_tokens for engine in self.engines)

    @property
    def slow(self) -> dict[str, float]:
        """The engines whose steps take longer than those of their role, by how much."""
        found = {}
        for engine in self.engines:
            ratio = self.steps.slowness(engine.steps)
            if ratio > SLOW_RATIO:
                found[engine.url] = ratio
        return found

    def mean_until_first(self) -> float:
        """Returns the mean seconds of a request from its arrival to its first token."""
        # An engine without requests waits for none: it is no engine with short waits.
        requests = sum(engine.requests for engine in self.engines)
        seconds = 0.0
        for engine in self.engines:
            seconds += engine.requests * (engine.arrival_wait + engine.queue + engine.first)
        return seconds / requests if requests else 0.0

    def mean_first(self) -> float:
        """Returns the mean seconds from a request's first step to its first token."""
        requests = sum(engine.requests for engine in self.engines)
        seconds = sum(engine.requests * engine.first for engine in self.engines)
        return seconds / requests if requests else 0.0

    def mean_landing_wait(self) -> float:
        """Returns the mean seconds from the landing of KV until the step that runs then ends."""
        sums = added(engine.landings for engine in self.engines)
        count = sums.get("landings*landings", 0.0)
        return sums.get("landings*seconds", 0.0) / count if count else 0.0


class FleetProfile(msgspec.Struct, frozen=True):
    """Step times by role, the hand-off, and the path of a request outside the engines."""

    prefill: RoleProfile
    decode: RoleProfile
    handoff: MeasuredHandoff | None
    path: float  # seconds
    proxy_queue: float  # mean seconds of a request in the proxy


def read(url: str, window: MetricWindow) -> EngineWindow:
    """Reads one engine's window. Raises ConfigError with one line if it exports no profile."""
    if not all(map(window.has, (STEP_SUMS, ARRIVAL_SUMS, LANDING_SUMS))):
        raise ConfigError(
            f"--live: {url} exports no step profile: it runs no DisaggConnector of this release,"
            " or --disable-log-stats; give --gpu, --profile or --coefficients"
        )
    steps = window.increases(STEP_SUMS, "product")
    handoffs = window.increases(HANDOFF_SUMS, "product")
    arrivals = window.increases(ARRIVAL_SUMS, "product")
    landings = window.increases(LANDING_SUMS, "product")
    sums = (*steps.values(), *handoffs.values(), *arrivals.values(), *landings.values())
    if not all(map(math.isfinite, sums)):
        raise ConfigError(f"--live: {url}/metrics has sums that are no finite numbers")
    if min(steps.values()) < 0:
        raise ConfigError(f"--live: {url} was restarted during the window: run this command again")
    for histogram in (QUEUE_SECONDS, PREFILL_SECONDS):
        if not window.has(f"{histogram}_sum"):
            raise ConfigError(
                f"--live: {url}/metrics has no {histogram}, so the path is not known;"
                " give --gpu, --profile or --coefficients"
            )
    return EngineWindow(
        url=url,
        seconds=window.seconds,
        steps=steps,
        handoffs=handoffs,
        arrivals=arrivals,
        landings=landings,
        requests=window.increase(f"{PREFILL_SECONDS}_count"),
        queue=window.mean(QUEUE_SECONDS),
        first=window.mean(PREFILL_SECONDS),
        kv_tokens=_kv_tokens(url, window),
    )


def _kv_tokens(url: str, window: MetricWindow) -> int:
    """Returns the tokens of KV cache of an engine."""
    found = []
    for name, labels in window.after:
        if name == CACHE_INFO:
            facts = dict(labels)
            found.append(facts.get("num_gpu_blocks", "") + "x" + facts.get("block_size", ""))
    if len(found) != 1:
        raise ConfigError(
            f"--live: {url}/metrics has {CACHE_INFO} {len(found)} times: its KV is not known;"
            " give --gpu, --profile or --coefficients"
        )
    blocks, _, size = found[0].partition("x")
    if not (blocks.isdecimal() and size.isdecimal() and int(blocks) and int(size)):
        raise ConfigError(f"--live: {url}/metrics: {CACHE_INFO} lacks num_gpu_blocks or block_size")
    return int(blocks) * int(size)


def of_role(role: str, engines: Sequence[EngineWindow]) -> RoleProfile:
    """Fits the steps of all engines of a role.

    Raises ConfigError if they were too few. `role`: prefill, decode or colocated.
    """
    sums = added(engine.steps for engine in engines)
    found = {
        "prompts": sums.get("prompt_steps*prompt_steps", 0.0),
        "answers": sums.get("steps*steps", 0.0) - sums.get("prompt_steps*prompt_steps", 0.0),
    }
    needed = {"prefill": ["prompts"], "decode": ["answers"]}.get(role, list(found))
    for kind in needed:
        if found[kind] < MIN_STEPS:
            raise ConfigError(
                f"--live: {found[kind]:.0f} steps of {kind} in the window at the {role} engines;"
                f" {MIN_STEPS} or more are needed: give more --window"
            )
    return RoleProfile(list(engines), fit_steps(sums))


def disaggregated(
    proxy: MetricWindow, prefills: Sequence[EngineWindow], decodes: Sequence[EngineWindow]
) -> FleetProfile:
    """Fits a disaggregated fleet, and finds the path from the parts of the measured TTFT.

    A request waits in the proxy and in P, is computed there, its KV moves, it waits for the end of
    D's running step, and D computes its last token.
    """
    prefill = of_role("prefill", prefills)
    decode = of_role("decode", decodes)
    handoff = fit_handoffs(added(engine.handoffs for engine in decodes))
    queue = proxy.mean("vllm_disagg_queue_seconds")
    parts = queue + prefill.mean_until_first()
    parts += (handoff.mean if handoff else 0.0) + decode.mean_landing_wait() + decode.mean_first()
    path = max(0.0, proxy.mean("vllm_disagg_ttft_seconds") - parts)
    return FleetProfile(prefill, decode, handoff, path, queue)


def colocated(proxy: MetricWindow, engines: Sequence[EngineWindow]) -> FleetProfile:
    """Fits a colocated fleet, and finds the path from the parts of the measured TTFT."""
    both = of_role("colocated", engines)
    queue = proxy.mean("vllm_disagg_queue_seconds")
    parts = queue + both.mean_until_first()
    path = max(0.0, proxy.mean("vllm_disagg_ttft_seconds") - parts)
    return FleetProfile(both, both, None, path, queue)


def with_latencies(scenario: Scenario, prefill: LinearLatency, decode: LinearLatency) -> Scenario:
    """Returns the scenario with other step times."""
    return msgspec.structs.replace(
        scenario,
        prefill=msgspec.structs.replace(scenario.prefill, fitted=prefill),
        decode=msgspec.structs.replace(scenario.decode, fitted=decode),
    )


def scenario_of(scenario: Scenario, profile: FleetProfile, ranks: int) -> Scenario:
    """Returns the scenario with the engines' step times, KV, path and hand-off.

    `ranks` read a prompt's KV at once; 0 keeps the scenario's link.
    """
    path = PathDelay(profile.path)
    link = scenario.link
    if ranks and profile.handoff:
        link = profile.handoff.link(ranks, has_bytes=bool(scenario.prefill.model))
    measured = msgspec.structs.replace(
        with_latencies(scenario, profile.prefill.steps.latency(), profile.decode.steps.latency()),
        link=link,
        notice=0.0,  # a part of the measured path
    )
    return msgspec.structs.replace(
        measured,
        prefill=msgspec.structs.replace(
            measured.prefill, kv_tokens=profile.prefill.kv_tokens, path=path
        ),
        decode=msgspec.structs.replace(
            measured.decode, kv_tokens=profile.decode.kv_tokens, path=path
        ),
    )


def uncertain(profile: FleetProfile) -> str:
    """Returns why the engines' steps do not determine their times; empty if they do."""
    if profile.handoff is None:
        return (
            "no decode engine loaded KV in the window, so the hand-off is not known: send prompts"
            " that are disaggregated"
        )
    for role, steps, sample in (
        ("prefill", profile.prefill.steps, profile.prefill.steps.prompt_step()),
        ("decode", profile.decode.steps, profile.decode.steps.decode_step()),
    ):
        error = steps.error(sample)
        if math.isinf(error):
            return (
                f"the steps of the {role} engines are too alike to fit their times: a --window with"
                " other prompts and answers decides"
            )
        if error > MAX_STEP_ERROR:
            longer = math.ceil((error / MAX_STEP_ERROR) ** 2)
            return (
                f"the steps of the {role} engines differ so much that their mean time is known"
                f" within {error:.0%} only: a --window {longer} times as long decides"
            )
    return ""


def unexplained(simulated: Mapping[str, float], ttft: float, tpot: float) -> str:
    """Returns why the simulation is not this deployment; empty if it has the measured means."""
    for name, measured in (("ttft", ttft), ("tpot", tpot)):
        if abs(simulated[name] - measured) > MAX_MEAN_ERROR * measured:
            return (
                f"at the measured rate the simulation has a mean {name.upper()} of"
                f" {simulated[name]:.3g} s, measured were {measured:.3g} s: lengths or arrivals"
                " differ from those assumed; --workload with a trace of them decides"
            )
    return ""


def facts(profile: FleetProfile) -> dict[str, Any]:
    """Describes what the engines measured of themselves, for JSON documents."""
    found: dict[str, Any] = {
        "handoff": profile.handoff.mean if profile.handoff else 0.0,
        "path": profile.path,
        "proxy_queue": profile.proxy_queue,
    }
    for role, measured, sample, steps in (
        (
            "prefill",
            profile.prefill,
            profile.prefill.steps.prompt_step(),
            profile.prefill.steps.prompt_steps,
        ),
        (
            "decode",
            profile.decode,
            profile.decode.steps.decode_step(),
            profile.decode.steps.decode_steps,
        ),
    ):
        busy = sum(engine.busy for engine in measured.engines) / len(measured.engines)
        found[role] = {
            "seconds": measured.steps.fit.value(sample),
            "error": measured.steps.error(sample),
            "steps": steps,
            "busy": busy,
            "coefficients": measured.steps.fit.coefficients,
            "slow": measured.slow,
        }
    return found
