"""The scheduler's half of the connector: from vLLM's requests to events for the workers.

It opens no sockets and waits for nothing. Only a verified grant makes a request more than an
ordinary local one; whatever else stands in `kv_transfer_params` is ignored. Each request with a
grant is one record, in one state.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_disagg.errors import BadGrant, Unmappable
from vllm_disagg.fleet import dialling
from vllm_disagg.fleet.grants import ANSWER_KEY, MAX_VALIDITY_SECONDS, REQUEST_KEY, Grant, verify
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.kv import reshard
from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol import events
from vllm_disagg.protocol.peers import EngineCard, EngineInfo, WorkerInfo

from . import compat, prompt_digest
from .metadata import Handshake, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.scheduler")

# With nothing to do but to wait for KV, vLLM's engine looks for it in steps of about a millisecond,
# spinning in between on whatever core is free, perhaps the one that computes this very prefill.  A
# pause costs a load so much at the most.
IDLE_STEP_SLEEP_SECONDS = 0.002  # seconds
MAX_USED_GRANTS = (
    1 << 18
    # grants that are good at a time (up to 60 MB): each works once, so those used are remembered
    # until their end
)
NULL_BLOCK = 0  # vLLM's block that holds nothing
MAX_CACHED_PLANS = 256  # prefill engines whose plan is remembered
REUSE_LOOKUP_SECONDS = 0.25  # seconds that a prefill leg waits for D's word on what it has cached
REUSE_STALL_SECONDS = (
    1.0  # seconds without progress after which it computes what was to come from D
)
NORMAL_ENDS = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


class LegState(Enum):
    NEW = auto()
    COMPUTING = auto()  # prefill leg: the workers know its blocks
    LOADING = auto()  # decode leg: the workers fetch
    LOCAL = auto()  # whatever it was, it is an ordinary request now


class ReuseState(Enum):
    """Of a prompt's beginning that D has cached, an earlier answer perhaps: D serves it, P reads it
    back.
    """

    NEW = auto()
    SEEKING = auto()  # prefill leg: how much is it?
    READING = auto()  # prefill leg
    SERVING = auto()  # decode leg: the workers know the blocks, which are this request's
    OVER = auto()


@dataclass
class RequestLeg:
    grant: Grant
    length: int  # tokens of the prompt
    prompt: str  # a digest of it
    plan: ReshardPlan | None = (
        None  # who reads what: of P for a decode leg, of D for a prefill leg that may
    )
    state: LegState = LegState.NEW
    computed: int = 0  # tokens announced to the workers
    back: ReuseState = ReuseState.OVER
    local: int = 0  # decode leg: tokens from our prefix cache
    found: list[int] = field(
        default_factory=list
    )  # prefill leg: tokens that D has, by each of our ranks that knows
    until: float = 0.0  # how long to wait for that, once it is the request's turn
    refused: bool = False  # the grant did not hold: its answer says so
    steps_aside: bool = False  # its load has ended, and vLLM has not asked since

    @property
    def waits(self) -> bool:
        """Whether it needs nothing but steps that bring news."""
        return self.state is LegState.LOADING or self.back in (
            ReuseState.SEEKING,
            ReuseState.READING,
        )


def _blocks(ids: Sequence[int], size: int, token: int, end: int) -> events.GroupBlocks:
    """Of one group: those that hold [token, end), without the ones before a window, for which vLLM
    puts its null block.
    """
    first, stop = token // size, -(-end // size)
    while first < stop - 1 and ids[first] == NULL_BLOCK:
        first += 1
    return events.GroupBlocks(first * size, list(ids[first:stop]))


class SchedulerSide:
    def __init__(
        self,
        key: FleetKey,
        role: str,
        layout: dict[str, str],
        groups: Sequence[KVCacheGroupSpec],
        *,
        rank: int | None = None,
        two_way: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        """`rank`: among the data parallel ranks behind one API server, if there are several.
        `two_way`: whether P may read back what D has cached, unless the kind of KV forbids it.
        `host`: the workers' own address.
        """
        self._key = key
        self._loopback_only = not key.is_set or dialling.is_loopback(host)
        self._rank = rank
        self._role = role
        self._layout = layout
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        # vLLM computes the last token of a prompt that is loaded whole again.  With windows, it has
        # not allocated the oldest token that this one looks back to; a state is changed by it.  So
        # the last one is left out of the load.
        specs = [
            one
            for g in groups
            for one in compat.specs_by_layer(g.kv_cache_spec).values() or [g.kv_cache_spec]
        ]
        self._has_states = any(compat.is_state(spec) for spec in specs)
        self._last = int(self._has_states or any(compat.window(spec) for spec in specs))
        self._two_way = two_way and not self._last
        self._plans: dict[tuple[str, ...], ReshardPlan] = {}  # by the names of P's workers
        self._legs: dict[str, RequestLeg] = {}  # by vLLM's request id
        self._seeking: dict[str, RequestLeg] = {}  # by the transfer back
        self._used: set[tuple[str, str]] = set()
        self._ends: list[
            tuple[float, tuple[str, str]]
        ] = []  # a heap of the same, the first to end on top
        self._began = time.monotonic()
        self._next = StepMetadata()
        self.engine: EngineInfo | None = None

    def set_workers(self, handshakes: Sequence[Handshake]) -> None:
        """All ranks in order: stages of the pipeline, in each the tensor parallel ranks, which hold
        the same layers.
        """
        names = "".join(handshake.worker.name for handshake in handshakes)
        numbers: dict[str, int] = {}  # of layers in the model
        forms: Counter[str] = Counter()
        workers = []
        for handshake in handshakes:
            holds = handshake.worker.holds
            for name, layer in zip(handshake.layers, holds.layers, strict=True):
                if name not in numbers:
                    kind = holds.kinds[layer]
                    forms[f"{kind.total_heads} heads of {kind.fingerprint}"] += 1
                numbers.setdefault(name, len(numbers))
            holds = msgspec.structs.replace(
                holds, first=numbers[handshake.layers[0]] if handshake.layers else 0
            )
            workers.append(msgspec.structs.replace(handshake.worker, holds=holds))
        digest = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:12]
        self.engine = EngineInfo(
            incarnation=hashlib.sha256(names.encode()).hexdigest()[:16],
            role=self._role,  # type: ignore[arg-type]
            workers=workers,
            layout={
                **self._layout,
                "layers": f"{len(numbers)} ({digest})",
                "KV of a token": "; ".join(
                    f"{count} layers of {form}" for form, count in sorted(forms.items())
                ),
            },
            rank=self._rank,
            two_way=self._two_way,
        )
        log.info("engine %s (%s) is ready for KV transfers", self.engine.incarnation, self._role)

    # A request comes ------------------------------------------------------------------------------
    def add(self, request: Request, *, arrives: bool = False) -> RequestLeg | None:
        """The record of a request with a grant that holds; None for every other request.

        `arrives`: vLLM has not looked for the prompt in its prefix cache yet.
        """
        leg = self._legs.get(request.request_id)
        if leg is not None:
            return leg
        params = request.kv_transfer_params
        if not isinstance(params, dict) or REQUEST_KEY not in params:
            return None
        try:
            grant = verify(self._key, params[REQUEST_KEY])
        except BadGrant as error:
            log.warning(
                "request %s: grant refused (%s); it is served here alone", request.request_id, error
            )
            request.kv_transfer_params = None  # asked once, said once
            return None
        try:
            self._accept(grant)
        except BadGrant as error:
            log.warning(
                "request %s: grant refused (%s); it is served here alone", request.request_id, error
            )
            leg = self._legs[request.request_id] = RequestLeg(
                grant, request.num_prompt_tokens, "", state=LegState.LOCAL, refused=True
            )
            return leg
        plan = self._plan(grant.sources) if grant.leg == "decode" else self._plan_back(grant)
        digest = prompt_digest.prompt(request) if grant.leg != "probe" else ""
        # With windows, when P's request ends, vLLM gives back what a token after the prompt would
        # not look at any more.  D, which computes the prompt's last token, looks at one token more,
        # perhaps in one block more.
        leaves_out = self._has_states or (arrives and self._last)
        one = compat.generates_one(request)
        if (
            digest
            and grant.leg == "prefill"
            and request.num_prompt_tokens > 1
            and leaves_out
            and one
        ):
            compat.leave_out_last(request)
        leg = self._legs[request.request_id] = RequestLeg(
            grant, request.num_prompt_tokens, digest, plan
        )
        if grant.back and self._two_way and plan and grant.back != grant.transfer:
            leg.back = self._new_back(grant.back, grant.until)
        if grant.leg != "probe":
            ours = self._next.loading if grant.leg == "decode" else self._next.serving
            ours[grant.transfer] = request.request_id
            if not digest or (grant.leg == "prefill" and self._last and not one):
                # A second token would be cached under the hash of the one that is left out.
                why = (
                    "a prefill leg of more than one token"
                    if digest
                    else "nothing tells whose prompt this is"
                )
                log.warning("request %s: %s; it is served here alone", request.request_id, why)
                self._give_up(leg)
        return leg

    def _new_back(self, back: str, until: float) -> ReuseState:
        try:
            self._use("back", back, until)
        except BadGrant:
            return ReuseState.OVER
        return ReuseState.NEW

    def _give_up(self, leg: RequestLeg) -> None:
        """No KV for this request, and the other engine shall not wait."""
        self._end_back(leg)
        if leg.grant.leg == "decode":
            self._make_local(leg)
        else:
            self._withdraw(leg)

    def _accept(self, grant: Grant) -> None:
        if grant.leg == "probe" and not grant.engine:
            return
        if self.engine is None or grant.engine != self.engine.incarnation:
            raise BadGrant("for another engine, or for this one before its restart")
        if grant.leg != "probe" and self._role not in (grant.leg, "both"):
            raise BadGrant(f"a {grant.leg} leg, but this engine's role is {self._role}")
        self._use(grant.leg, grant.transfer, grant.until)
        try:
            self._check_sources(self.engine, grant)
        except BadGrant:
            if grant.leg == "prefill":  # D shall not wait for it
                self._next.prefill.append(events.BlocksRevoked(grant.transfer))
            raise

    def _check_sources(self, engine: EngineInfo, grant: Grant) -> None:
        """Before anything is dialled."""
        names = {worker.name for worker in grant.sources}
        if len(names) < len(grant.sources):
            raise BadGrant("names one worker twice")
        if names & {worker.name for worker in engine.workers}:
            raise BadGrant(
                "names this engine's own workers: it cannot be both engines of a request"
            )
        if (
            grant.leg != "decode"
        ):  # without what D has cached it is a prefill leg all the same: `_plan_back`
            return
        if words := dialling.refusal(grant.sources, loopback_only=self._loopback_only):
            raise BadGrant(words)
        try:
            self._plan(grant.sources)
        except Unmappable as error:
            raise BadGrant(f"P holds what cannot be read here: {error}") from None

    @property
    def clock(self) -> float:
        """Seconds, by which grants end."""
        return time.monotonic() - self._began

    def _use(self, use: str, transfer: str, until: float) -> None:
        """A grant's transfer id works once in each use, and until its end."""
        now = self.clock
        while self._ends and self._ends[0][0] < now:
            self._used.discard(heapq.heappop(self._ends)[1])
        if until < now:
            raise BadGrant(f"it ended {now - until:.1f} s ago")
        if until > now + MAX_VALIDITY_SECONDS:
            raise BadGrant(f"good for {until - now:.0f} s, which is too long")
        if use == "probe":  # it changes nothing
            return
        if (use, transfer) in self._used:
            raise BadGrant("used before")
        if len(self._used) >= MAX_USED_GRANTS:  # to forget one would make it new
            raise BadGrant("too many others are still good")
        self._used.add((use, transfer))
        # Without a key any client mints what it likes, also an end that comes before its
        # transfer's.
        ends = until if self._key.is_set else now + MAX_VALIDITY_SECONDS
        heapq.heappush(self._ends, (ends, (use, transfer)))

    def _plan(self, sources: Sequence[WorkerInfo]) -> ReshardPlan:
        """Who of us reads what of these workers; Unmappable if that cannot be."""
        assert self.engine is not None
        names = tuple(worker.name for worker in sources)
        if names not in self._plans:
            ours = [worker.holds for worker in self.engine.workers]
            self._plans[names] = reshard.plan([worker.holds for worker in sources], ours)
            if len(self._plans) > MAX_CACHED_PLANS:
                del self._plans[next(iter(self._plans))]
        return self._plans[names]

    def _plan_back(self, grant: Grant) -> ReshardPlan | None:
        """For a prefill leg that may read what D has cached. If it cannot, it is a prefill leg all
        the same.
        """
        if not grant.back:
            return None
        if words := dialling.refusal(grant.sources, loopback_only=self._loopback_only):
            log.warning("what D has cached is not read: %s", words)
            return None
        try:
            return self._plan(grant.sources)
        except Unmappable as error:
            log.warning("what D has cached cannot be read here: %s", error)
            return None

    # The decode leg -------------------------------------------------------------------------------
    def tokens_to_load(self, request: Request, local: int) -> int | None:
        """How many tokens of the prompt, after `local` ones from our prefix cache, come from the
        other engine.

        None: that is not known yet, or the load has failed. vLLM looks at requests that hold blocks
        before all others, and stops where one needs more than there are. One whose load has failed
        holds none any more, and with windows it needs more to compute than it did to load: in front
        of those that hold the pool it would stop vLLM for ever. None sends it to the other
        requests, where it waits its turn behind nobody who could be kept from running; once is
        enough, and more than once would let it starve beside a stream of loads.
        """
        leg = self.add(request)
        if leg is None:
            return 0
        if leg.steps_aside:
            leg.steps_aside = False
            return None
        if leg.state is not LegState.NEW:
            return 0
        if leg.grant.leg != "decode":
            return self._tokens_back(leg, local)
        leg.local = local
        missing = leg.length - self._last - local
        # With all whole blocks here, the rest is computed faster than it is fetched, and computed
        # it must be partly.
        return 0 if missing <= 0 or (local and missing <= max(self._block_sizes)) else missing

    def allocated(self, request: Request, blocks: Sequence[list[int]], external: int) -> None:
        """`blocks`: by group, of the whole request."""
        leg = self._legs.get(request.request_id)
        if leg is None or leg.state is not LegState.NEW:
            return
        if leg.grant.leg != "decode":
            self._read_back(leg, request.request_id, blocks, external)
            return
        self._serve_back(leg, blocks)
        if external == 0:
            self._make_local(leg)
            return
        leg.state = LegState.LOADING
        end = leg.length - self._last
        wanted = [
            _blocks(ids, size, end - external, end)
            for size, ids in zip(self._block_sizes, blocks, strict=True)
        ]
        assert leg.plan is not None  # a decode leg
        self._next.decode.append(
            events.LoadRequested(
                leg.grant.transfer,
                leg.grant.sources,
                leg.plan,
                wanted,
                end,
                leg.grant.patience,
                leg.prompt,
            )
        )

    def loaded(self, request_id: str) -> None:
        leg = self._legs.get(request_id)
        if leg is None:
            return
        leg.steps_aside = True
        if leg.state is LegState.LOADING:
            leg.state = LegState.LOCAL
            self._end_back(
                leg
            )  # after a failure vLLM frees the blocks; after a success P has read what it wanted
        elif leg.back is ReuseState.READING:
            leg.back = ReuseState.OVER

    def _make_local(self, leg: RequestLeg) -> None:
        leg.state = LegState.LOCAL
        assert self.engine is not None  # or its grant had been refused
        nobody = reshard.nothing(len(leg.grant.sources), len(self.engine.workers))
        self._next.decode.append(events.LoadSkipped(leg.grant.transfer, leg.grant.sources, nobody))

    # What D has cached ----------------------------------------------------------------------------
    def _serve_back(self, leg: RequestLeg, blocks: Sequence[list[int]]) -> None:
        """The decode leg's blocks from our prefix cache are this request's until it is preempted or
        ends, so P may read.
        """
        if leg.back is not ReuseState.NEW:
            return
        held = [
            list(ids[: leg.local // size])
            for size, ids in zip(self._block_sizes, blocks, strict=True)
        ]
        if not leg.local or any(
            len(ids) * size < leg.local for size, ids in zip(self._block_sizes, held, strict=True)
        ):
            self._end_back(leg)  # MultiConnector shows no blocks to those that load nothing
            return
        leg.back = ReuseState.SERVING
        assert leg.grant.back is not None
        self._next.prefill.append(
            events.BlocksScheduled(leg.grant.back, leg.local, held, cached=True, prompt=leg.prompt)
        )

    def arrived(self, request: Request) -> None:
        """A prefill leg asks D at once how much there is, so that it is known when its turn comes."""
        leg = self.add(request, arrives=True)
        if (
            leg is not None
            and leg.grant.leg == "prefill"
            and leg.back is ReuseState.NEW
            and leg.grant.back
            and leg.plan
        ):
            leg.back = ReuseState.SEEKING
            self._seeking[leg.grant.back] = leg
            self._next.decode.append(
                events.LookupRequested(leg.grant.back, leg.grant.sources, leg.plan, leg.prompt)
            )

    def _tokens_back(self, leg: RequestLeg, local: int) -> int | None:
        """How many tokens a prefill leg reads back; None while D has not said how many there are."""
        if leg.back is not ReuseState.SEEKING:
            return 0
        leg.until = leg.until or time.monotonic() + REUSE_LOOKUP_SECONDS
        assert self.engine is not None  # or its grant had been refused
        is_known = len(leg.found) >= len(self.engine.workers)
        if not is_known and time.monotonic() < leg.until:
            return None
        there = min(leg.found) if is_known else 0
        if local < there < leg.length:
            return there - local
        self._end_back(leg)
        return 0

    def found(self, found: dict[str, list[int]]) -> None:
        """Ranks of ours know how many tokens there are of what is sought."""
        for back, counts in found.items():
            if (leg := self._seeking.get(back)) is not None:
                leg.found += counts

    def _read_back(
        self, leg: RequestLeg, request_id: str, blocks: Sequence[list[int]], external: int
    ) -> None:
        """A prefill leg has its blocks."""
        if leg.back is not ReuseState.SEEKING or not external:
            self._end_back(leg)
            return
        back, end = leg.grant.back, min(leg.found)
        assert back is not None and leg.plan is not None
        leg.back = ReuseState.READING
        del self._seeking[back]
        self._next.loading[back] = request_id
        wanted = [
            _blocks(ids, size, end - external, end)
            for size, ids in zip(self._block_sizes, blocks, strict=True)
        ]
        self._next.decode.append(
            events.LoadRequested(
                back, leg.grant.sources, leg.plan, wanted, end, REUSE_STALL_SECONDS, leg.prompt
            )
        )

    def _end_back(self, leg: RequestLeg) -> None:
        """Whatever it is, nothing more is read back or served."""
        was, leg.back, back = leg.back, ReuseState.OVER, leg.grant.back
        if was is ReuseState.OVER or back is None:
            return
        self._seeking.pop(back, None)
        if leg.grant.leg == "decode":
            self._next.prefill.append(events.BlocksRevoked(back))
        elif was is not ReuseState.NEW:
            self._next.decode.append(events.LoadCancelled(back))

    # The prefill leg ------------------------------------------------------------------------------
    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers have to know with this step."""
        for request_id in output.preempted_req_ids or ():
            self._withdraw(self._legs.get(request_id))
        if self._legs:
            for new in output.scheduled_new_reqs:
                self._scheduled(output, new.req_id, new.num_computed_tokens, new.block_ids)
            cached = output.scheduled_cached_reqs
            for request_id, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                self._scheduled(output, request_id, computed, blocks)
        metadata, self._next = self._next, StepMetadata()
        if not output.num_scheduled_tokens and any(leg.waits for leg in self._legs.values()):
            time.sleep(IDLE_STEP_SLEEP_SECONDS)
        return metadata

    def _scheduled(
        self,
        output: SchedulerOutput,
        request_id: str,
        computed: int,
        blocks: tuple[list[int], ...] | None,
    ) -> None:
        leg = self._legs.get(request_id)
        if (
            leg is None
            or leg.grant.leg != "prefill"
            or leg.state is LegState.LOCAL
            or leg.computed >= leg.length
        ):
            return
        leg.state = LegState.COMPUTING
        leg.computed = min(leg.length, computed + output.num_scheduled_tokens[request_id])
        held = [list(ids) for ids in blocks or [()] * len(self._block_sizes)]
        self._next.prefill.append(
            events.BlocksScheduled(leg.grant.transfer, leg.computed, held, prompt=leg.prompt)
        )

    def _withdraw(self, leg: RequestLeg | None) -> None:
        """The blocks of a leg have been given up, perhaps before the other engine had them."""
        if leg is None:
            return
        self._end_back(leg)
        if leg.grant.leg == "prefill" and leg.state is not LegState.LOCAL:
            leg.state = LegState.LOCAL
            self._next.prefill.append(events.BlocksRevoked(leg.grant.transfer))

    # A request goes -------------------------------------------------------------------------------
    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks stay ours until the workers release them, what its answer says of
        this engine).
        """
        self.add(request)  # a request that ends before it was scheduled
        leg = self._legs.pop(request.request_id, None)
        if leg is None:
            return False, None
        self._end_back(leg)
        if leg.grant.leg == "decode":
            if leg.state is LegState.LOADING:
                self._next.decode.append(events.LoadCancelled(leg.grant.transfer))
            elif leg.state is LegState.NEW:
                self._make_local(leg)
            return False, None
        answer = {ANSWER_KEY: self._says(leg)}
        if leg.grant.leg == "probe" or leg.refused:
            return False, answer
        if (
            leg.state is not LegState.COMPUTING
            or leg.computed < leg.length
            or request.status.name not in NORMAL_ENDS
        ):
            self._withdraw(leg)
            return False, answer
        self._next.prefill.append(events.PrefillFinished(leg.grant.transfer))
        return True, answer

    def _says(self, leg: RequestLeg) -> Any:
        """Of this engine, in the answer of a prefill leg or a probe."""
        if self.engine is None:
            return None
        if leg.refused or not leg.grant.engine:
            return msgspec.to_builtins(
                EngineCard(self.engine.incarnation, self.clock, self.engine.rank)
            )
        return msgspec.to_builtins(msgspec.structs.replace(self.engine, clock=self.clock))
