"""The instances as the proxy sees them.  Pure state: no clock, no sockets.

An instance is `up` while it answers. `engine` is the connector's answer to a probe, None for a vLLM
without this project's connector.

Circuit breaker. After two consecutive failures an `up` instance is skipped for a backoff period:

    closed     fewer than two consecutive failures: requests are sent
    open       now < open_until: skipped, if another instance can serve
    half-open  now >= open_until: one trial request; sending it opens the breaker again
               success closes it; failure doubles the backoff, from 1 s up to MAX_BACKOFF_SECONDS

A probe closes it only if the instance was down, or is another process.

An open breaker is a preference, not a lock: without any other instance, an open one is used all the
same. A failure counts only if its request was sent after the last verdict: the last success, or the
last failure that counted. So requests that were in flight together count once, and never beside a
success.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ...fleet import dialling
from ...protocol.peers import EngineInfo, engine_difference
from ..http.addresses import split_rank
from ..http.endpoint_schema import RANKLESS
from ..http.reasons import SERVER_DEATHS, STOPPING_DETAIL, Reason
from .engine_steps import StepMonitor
from .prefill_times import PrefillTimes

Role = Literal["prefill", "decode"]
Connector = Literal["disagg", "nixl", "plain"]  # this project's, NixlConnector, none known

MAX_FAILED_PROBES = 2  # consecutive failed health checks until an instance counts as down
NOT_PROBED = "not probed yet"
REFUSES = "refuses connections"
SILENT = "is silent"
NO_CONNECTION = "the network brings no connection to it"
MAX_SILENCE_SECONDS = 30.0  # of an instance without alternative, until its requests fail
TRANSFERS_OFF = 'its log has a line "KV transfers are off", with the reason'
OTHER_RELEASE = "install the same release of vllm-disagg for both"  # it and the proxy
NO_CONNECTOR = "it runs without this project's connector, or with another version of it"
MAX_DOUBLINGS = 16  # of the backoff
MAX_BACKOFF_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class Instance:
    """One engine: a vLLM server, or one data parallel rank of a server (URL@RANK).

    Times are seconds of the event loop's clock, unless noted.
    """

    url: str
    role: Role
    server: str = field(init=False)  # the API server's URL: its data parallel ranks share it
    named_role: Role = field(init=False)  # as its source names it; `role` may follow the load
    rank: int | None = field(init=False)
    model: str = ""
    engine: EngineInfo | None = None
    up: bool = False
    # For operators: why it is not used, or not used in full.
    unavailable_reason: str = NOT_PROBED
    needs_probe: bool = True
    failed_probes: int = 0  # consecutive health checks
    consecutive_failures: int = 0  # of legs
    last_verdict_at: float = 0.0  # time of the last success, or of the last failure that counted
    open_until: float = 0.0  # the circuit breaker is open before this time
    in_flight: int = 0  # requests at a decode instance
    prefill_legs: int = 0  # running prefill legs
    prompt_bytes: int = 0  # in those legs
    last_choice: int = 0  # the value of Fleet.choices when it was chosen last
    context_bytes: int = 0  # prompts of requests in flight
    aggregated_requests: int = 0  # requests of which it computes the whole prompt
    kv_cache_usage: float = 0.0  # 0 to 1, last reported
    is_usage_known: bool = False  # whether `kv_cache_usage` is the engine's own report
    # Requests that wait in the engine for room, last reported; None if it is not known.
    waiting_in_engine: float | None = None
    state_since: float = 0.0  # when it became up or down
    # When it last answered a health check, or bytes of a stream came.
    last_sign_at: float = float("-inf")
    last_failure: str = ""  # of a leg, a probe or a health check, for operators
    last_failure_at: float = 0.0
    models: frozenset[str] = frozenset()  # all names that it serves
    generates: bool = True  # has /v1/completions: not with models for embeddings, scores, speech
    unsupported_paths: set[str] = field(default_factory=set)  # paths at which it ignores grants
    connector: Connector = "plain"
    can_transfer: bool = False  # it can take part in disaggregation in its role, once up
    compatibility_key: str = ""  # instances of the other role with an equal key can be paired
    step_monitor: StepMonitor = field(default_factory=StepMonitor)
    prefill_times: PrefillTimes = field(default_factory=PrefillTimes)
    engine_names: frozenset[str] = frozenset()  # its incarnation, and its workers' names
    reach: dialling.Reach | None = None  # of its workers, without which no KV comes from it
    clock_offset: float = 0.0  # its engine's clock minus the proxy's, last reported
    clock_read_at: float = float("-inf")  # when it was reported
    # Identity of the prefix cache's content; a restart makes a new one.
    cache_identity: object = field(default_factory=object)

    def __post_init__(self) -> None:
        self.named_role = self.role
        self.server, self.rank = split_rank(self.url)

    def on_probe_answered(
        self,
        model: str,
        engine: EngineInfo | None,
        models: Iterable[str] = (),
        nixl: bool = False,
        refusal: str = "",
    ) -> None:
        """Notes a probe's answer: marks the instance up and learns its identity.

        `engine`: the connector's answer. `models`: other names of the served model. `nixl`: the
        answer was NixlConnector's. `refusal`: why the connector has described no engine.
        """
        if self._was_replaced(engine):
            self.consecutive_failures = 0
            self.open_until = 0.0
        if self._is_new_incarnation(engine):
            self.cache_identity = object()
            self.unsupported_paths = set() if self.rank is None else set(RANKLESS)
        self.up = True
        self.needs_probe = False
        self.unavailable_reason = ""
        self.failed_probes = 0
        self.model = model
        self.engine = engine
        if not self.takes_both_roles:
            self.role = self.named_role  # the engine before may have taken both
        self.models = frozenset((model, *models))
        self.engine_names = frozenset()
        self.reach = dialling.reach(engine) if engine else None
        self.connector = "plain"
        self.compatibility_key = ""
        if engine:
            self.connector = "disagg"
            self.engine_names = frozenset((engine.incarnation, *(w.name for w in engine.workers)))
            # A str caches its hash, which makes grouping by this key cheap.
            self.compatibility_key = repr(("disagg", sorted(engine.layout.items())))
        elif nixl:
            # NixlConnector's engines compare their layouts themselves when they first connect.
            self.connector = "nixl"
            self.compatibility_key = repr(("nixl", model))
        self.unavailable_reason = self._role_problem(refusal)
        self.can_transfer = not self.unavailable_reason

    @property
    def takes_both_roles(self) -> bool:
        """Whether its engine was started for both roles (`kv_both`)."""
        return self.engine is not None and self.engine.role == "both"

    def take_role(self, role: Role) -> None:
        """Takes a role for its new requests, unless its engine was started for one role."""
        if self.engine is None or self.takes_both_roles:
            self.role = role

    @property
    def metrics_label(self) -> int | None:
        """The value of `engine` in its server's metrics; None for a server with one engine.

        A server of some ranks of an engine counts them from 0, and its metrics do not.
        """
        if self.rank is None or self.engine is None or self.engine.label is None:
            return self.rank
        return self.engine.label

    def _was_replaced(self, engine: EngineInfo | None) -> bool:
        """Whether earlier failures are void: it was down, or another process answers now.

        A process that answers all probes may still fail all requests.
        """
        before = self.engine.incarnation if self.engine else ""
        return not self.up or before != (engine.incarnation if engine else "")

    def _is_new_incarnation(self, engine: EngineInfo | None) -> bool:
        """Whether another process may run than at the last probe; True if either is unknown."""
        if not self.up or not self.engine or not engine:
            return True
        return self.engine.incarnation != engine.incarnation

    def _role_problem(self, refusal: str) -> str:
        """Returns why it takes no part in disaggregation although it is up; "" if it can."""
        if self.connector == "nixl":
            return ""
        if self.engine is None:
            return f"serves no KV transfers: {refusal or NO_CONNECTOR}"
        if self.engine.role not in (self.role, "both"):
            return f"is given as --{self.role}, but its connector's role is {self.engine.role}"
        if self.engine.rank == self.rank:
            return ""
        if self.engine.rank is None:
            return f"is no data parallel rank: give it as {self.server}"
        return f"has several data parallel ranks: give each as an instance, {self.url}@0 and so on"

    def set_clock(self, engine_clock: float, asked_at: float, now: float) -> None:
        """Notes the engine's clock, from an answer that was read at `now`.

        It may have come long before, in a pause of the proxy. So the offset that is known stays
        while the answer fits it. Grants would end too early by the pause.
        """
        if not asked_at <= engine_clock - self.clock_offset <= now:
            self.clock_offset = engine_clock - now
        self.clock_read_at = now

    def engine_clock_after(self, seconds: float, now: float) -> float:
        """Returns the engine's clock in so many seconds, but for the time that an answer took."""
        return max(0.0, now + self.clock_offset + seconds)

    def mark_down(self, reason: str) -> None:
        """Takes the instance out of use until it answers a probe; `reason` is for operators."""
        self.up = False
        self.needs_probe = True
        self.unavailable_reason = reason

    def on_probe_failed(self, reason: str) -> None:
        """Counts a failed health check; the second in a row marks the instance down."""
        self.failed_probes += 1
        if self.up and self.failed_probes >= MAX_FAILED_PROBES:
            self.mark_down(reason)

    def on_leg_failed(
        self,
        reason: str,
        now: float,
        started_at: float | None = None,
        ended_at: float | None = None,
    ) -> None:
        """Notes a failure of a leg sent at `started_at`, unless its reason is "local".

        `ended_at`: when the leg ended, by default `now`. A leg that was sent before the last
        verdict adds nothing to the circuit breaker.
        """
        if reason == "local":
            return
        self.last_failure = reason
        self.last_failure_at = now
        if self.up and reason in SERVER_DEATHS:
            self.state_since = now  # requests wait from then on
        if reason == "refused":
            self.mark_down(REFUSES)
        elif reason == "no_connection":
            self.mark_down(NO_CONNECTION)
        elif reason == "died":
            self.mark_down("its engine died")
        elif reason == "stopping":
            self.mark_down(STOPPING_DETAIL)
        elif reason == "reset":
            self.needs_probe = True  # the process may have been restarted
        if started_at is None or started_at >= self.last_verdict_at:
            self.consecutive_failures += 1
            self.last_verdict_at = now if ended_at is None else ended_at
            self._open_breaker(now)

    def on_leg_succeeded(self, now: float) -> None:
        """Closes the circuit breaker."""
        self.consecutive_failures = 0
        self.last_verdict_at = now
        self.open_until = 0.0

    def on_chosen(self, now: float) -> None:
        """Notes that a request is sent: a half-open breaker opens again behind this one trial."""
        if now >= self.open_until:
            self._open_breaker(now)

    def _open_breaker(self, now: float) -> None:
        if self.consecutive_failures > 1:
            # Bounded before the power: 2.0 ** 1024 raises, and an instance may fail for days.
            backoff = 2.0 ** min(self.consecutive_failures - 2, MAX_DOUBLINGS)
            self.open_until = now + min(backoff, MAX_BACKOFF_SECONDS)

    @property
    def active_requests(self) -> int:
        """The number of running requests and prefill legs."""
        return self.in_flight + self.prefill_legs

    @property
    def bidirectional(self) -> bool:
        """Whether its connector supports bidirectional KV reuse."""
        return self.engine is not None and self.engine.two_way

    def add_request(self, prompt_bytes: int) -> None:
        """Counts a request as in flight at this decode instance."""
        self.in_flight += 1
        self.context_bytes += prompt_bytes

    def remove_request(self, prompt_bytes: int) -> None:
        """Ends what `add_request` began."""
        self.in_flight -= 1
        self.context_bytes -= prompt_bytes

    def is_usable(self, now: float) -> bool:
        """Whether it is up and its circuit breaker is not open."""
        return self.up and now >= self.open_until

    def can_prefill(self, now: float) -> bool:
        """Whether a prefill leg can be sent to it."""
        return self.role == "prefill" and self.can_transfer and self.is_usable(now)


def is_one_engine(a: Instance, b: Instance) -> bool:
    """Whether two instances are one engine, as under two names of its address.

    An engine cannot read its own KV: both legs of a request would wait in one scheduler, and share
    their workers' tables.
    """
    return not a.engine_names.isdisjoint(b.engine_names)


def in_order(instance: Instance, other: Instance) -> tuple[Instance, Instance]:
    """Returns two instances of different roles, the prefill instance first."""
    return (instance, other) if instance.role == "prefill" else (other, instance)


def kind(instance: Instance) -> tuple[str, str, str]:
    """Returns all of an instance on which the words of a mismatch depend."""
    engine = instance.engine
    releases = (engine.release, engine.transformers) if engine else ("", "")
    return instance.compatibility_key, *releases


def mismatch(prefill: Instance, decode: Instance) -> str:
    """Returns the reason why two instances cannot be paired, for people; "" if they can."""
    if is_one_engine(prefill, decode):
        return "they are one engine, and no engine is paired with itself"
    if prefill.compatibility_key and prefill.compatibility_key == decode.compatibility_key:
        return ""
    connectors = (prefill.connector, decode.connector)
    if prefill.connector != decode.connector and "plain" not in connectors:
        return "they have different connectors"
    if prefill.connector == "nixl":
        return f"one serves {prefill.model} and the other {decode.model}"
    if not prefill.engine or not decode.engine:
        return "one of them serves no KV transfers"
    return engine_difference(prefill.engine, decode.engine)


@dataclass(slots=True)
class Fleet:
    """All instances behind one proxy."""

    instances: list[Instance] = field(default_factory=list)
    choices: int = 0  # how many choices of instances were made
    # Instances that get no new requests, kept until their running requests and drains have ended.
    leaving: list[Instance] = field(default_factory=list)
    # Instances that a source names and the admin API has drained, by URL with their named role.
    drained: dict[str, Role] = field(default_factory=dict)

    @property
    def has_served(self) -> bool:
        """Whether an instance was chosen here, or has requests of any proxy worker."""
        return self.choices > 0 or any(i.active_requests for i in self.instances)

    def with_role(self, role: Role) -> list[Instance]:
        """Returns the instances of one role, in the order of their addition."""
        return [instance for instance in self.instances if instance.role == role]

    def knows_model(self, model: str) -> bool:
        """Returns whether an instance serves this model, by its last probe."""
        return any(model in instance.models for instance in self.instances)

    def has_decode_for(self, model: str) -> bool:
        """Returns whether a decode instance that is up serves this model."""
        return any(i.up and i.role == "decode" and model in i.models for i in self.instances)

    def is_model_uncertain(self, model: str) -> bool:
        """Returns whether a decode instance that has never answered may alone serve this model.

        "No such model" of any other instance then proves nothing. One that refuses connections has
        no model.
        """
        if not model or self.knows_model(model):
            return False
        return any(
            not decode.models and not decode.unavailable_reason.startswith(REFUSES)
            for decode in self.with_role("decode")
        )

    def on_leg_failed(
        self, instance: Instance, reason: Reason, now: float, started_at: float | None = None
    ) -> None:
        """Notes a failure of a leg, and the end of its server at all ranks of that server."""
        instance.on_leg_failed(reason, now, started_at)
        if reason in SERVER_DEATHS:
            self.mark_server_down(instance)

    def mark_server_down(self, instance: Instance) -> None:
        """Takes the other data parallel ranks of an instance's server down, for its reason.

        An instance that has left the fleet shows nothing about its server.
        """
        if instance not in self.instances:
            return
        for other in self.instances:
            if other.server == instance.server and other.up:
                other.mark_down(instance.unavailable_reason)
                other.state_since = instance.state_since

    def with_other_ranks(self, instances: Iterable[Instance]) -> list[Instance]:
        """Returns these instances and all other data parallel ranks of their servers."""
        servers = {instance.server for instance in instances}
        return [instance for instance in self.instances if instance.server in servers]
