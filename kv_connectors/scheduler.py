"""The scheduler's half of the connector: turns vLLM's calls into events for the workers.

Runs in vLLM's scheduler step, opens no socket and waits for no answer. A request takes part in a
transfer only with a valid grant in `kv_transfer_params`; all other content there is ignored.

Theory. A *leg* is the request that the proxy sends to one engine for one client request. Each
request with a valid grant has one `RequestLeg`, with a `LegState` and a `ReuseState`. A leg of
kind `probe` only requests the engine's description, and never changes its state.

vLLM calls, in this order:

    on_request_arrived          once, before vLLM looks the prompt up in its prefix cache
    tokens_to_load              when the request's turn comes; repeated until there is room
    on_blocks_allocated         after each allocation of blocks; with the tokens to load
    build_step_metadata         in each step; the events go to all workers with that step
    on_lookup_counts            when ranks have reported how much the other engine has cached
    on_load_finished            when all ranks have ended a load, with or without success
    on_request_finished         once; decides whether the blocks stay until the workers release them

Main transfer, P to D (events in brackets):

    prefill leg     NEW --scheduled [BlocksScheduled]--> COMPUTING --finished [PrefillFinished]-->
                    NEW, COMPUTING --preempted, aborted, refused [BlocksRevoked]--> LOCAL
    decode leg      NEW --blocks to load [LoadRequested]--> LOADING --load finished--> LOCAL
                    NEW --nothing to load, aborted [LoadSkipped]--> LOCAL
                    LOADING --aborted [LoadCancelled]-->

A failed load leaves the leg LOCAL, so vLLM computes the prompt here.

Bidirectional KV reuse, D to P. D may have the start of the prompt cached, from an earlier answer.
It has a transfer id of its own, `grant.back`:

    prefill leg     NEW --arrived [LookupRequested]--> LOOKING_UP
                    LOOKING_UP --blocks allocated [LoadRequested]--> READING
                    READING --load finished--> ENDED
                    LOOKING_UP, READING --nothing to read, aborted [LoadCancelled]--> ENDED
    decode leg      NEW --blocks allocated [BlocksScheduled(cached)]--> SERVING
                    NEW, SERVING --load finished, preempted, aborted [BlocksRevoked]--> ENDED

The receiver recomputes what it does not get, so no state waits without a limit: the workers bound
the load, and `REUSE_LOOKUP_SECONDS` bounds the lookup.
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

# While all requests wait for KV, vLLM's engine loops in steps of about a millisecond. It spins in
# between, and may take the core that computes this very prefill. So an idle step sleeps; that
# delays a load by at most this time.
IDLE_STEP_SLEEP_SECONDS = 0.002
# Each grant works once, so used grants are remembered until they expire. This many may be valid at
# a time; they take up to 60 MB.
MAX_USED_GRANTS = 1 << 18
NULL_BLOCK = 0  # the id of vLLM's block without content
MAX_CACHED_PLANS = 256  # reshard plans, by the names of the other engine's workers
REUSE_LOOKUP_SECONDS = 0.25  # a prefill leg waits so long for the answers to its lookup
REUSE_STALL_SECONDS = 1.0  # a reuse load without progress for so long fails, and P computes
NORMAL_FINISH_STATUSES = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


class LegState(Enum):
    """The state of a leg's main transfer; transitions are in this file's docstring."""

    NEW = auto()
    COMPUTING = auto()  # prefill leg: the workers have its blocks
    LOADING = auto()  # decode leg: the workers read
    LOCAL = auto()  # both: an ordinary request from here on


class ReuseState(Enum):
    """The state of a leg's bidirectional KV reuse; transitions are in this file's docstring."""

    NEW = auto()
    LOOKING_UP = auto()  # prefill leg: the workers ask D how many tokens it has
    READING = auto()  # prefill leg: the workers read
    SERVING = auto()  # decode leg: the workers have the cached blocks, which this request holds
    ENDED = auto()  # also: never permitted


@dataclass
class RequestLeg:
    """One request with a grant, in both of its state machines."""

    grant: Grant
    prompt_tokens: int
    digest: str  # of all inputs of the prompt's KV; empty if they cannot be compared
    # Which rank reads what: of P for a decode leg, of D for a prefill leg that may reuse KV.
    plan: ReshardPlan | None = None
    state: LegState = LegState.NEW
    announced_tokens: int = 0  # prefill leg: computed or scheduled, as announced to the workers
    reuse: ReuseState = ReuseState.ENDED
    cached_tokens: int = 0  # decode leg: from this engine's prefix cache
    lookup_counts: list[int] = field(default_factory=list)  # tokens at D, one count for each rank
    lookup_deadline: float = 0.0  # monotonic seconds; 0.0 until the request's turn has come
    is_refused: bool = False  # the grant was not valid; the request's answer reports that
    yields_turn: bool = False  # a load has ended, and `tokens_to_load` was not called since

    @property
    def waits_for_kv(self) -> bool:
        """Whether the request can only go on after a report of the workers."""
        if self.state is LegState.LOADING:
            return True
        return self.reuse in (ReuseState.LOOKING_UP, ReuseState.READING)


def _blocks_of_tokens(
    ids: Sequence[int], block_size: int, token: int, token_end: int
) -> events.GroupBlocks:
    """Returns the blocks of one KV-cache group that hold the tokens [token, token_end).

    Leaves out leading null blocks: vLLM puts them where a sliding window has passed.
    """
    first = token // block_size
    stop = -(-token_end // block_size)
    while first < stop - 1 and ids[first] == NULL_BLOCK:
        first += 1
    return events.GroupBlocks(first * block_size, list(ids[first:stop]))


class SchedulerSide:
    """Keeps the legs of one engine and collects the events of the next step."""

    def __init__(
        self,
        key: FleetKey,
        role: str,
        layout: dict[str, str],
        groups: Sequence[KVCacheGroupSpec],
        *,
        rank: int | None = None,
        bidirectional_reuse: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        """Creates the scheduler's half, without workers yet.

        `role`: prefill, decode or both. `layout`: the facts of `compatibility.layout`.
        `rank`: the data parallel rank behind a common API server, None for a single engine.
        `bidirectional_reuse`: False forbids reuse; some kinds of KV forbid it as well.
        `host`: the address of the workers themselves.
        """
        self._key = key
        self._loopback_only = not key.is_set or dialling.is_loopback(host)
        self._rank = rank
        self._role = role
        self._layout = layout
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        specs = compat.all_specs(groups)
        self._has_states = any(compat.is_state(spec) for spec in specs)
        # vLLM computes the last token of a fully loaded prompt again. With a sliding window it has
        # not allocated the oldest token in that one's window. An SSM state would be advanced
        # twice. So the last token is left out of the load: 1 token, or 0.
        has_windows = any(compat.window(spec) for spec in specs)
        self._tokens_left_out = int(self._has_states or has_windows)
        self._permits_reuse = bidirectional_reuse and not self._tokens_left_out
        self._plans: dict[tuple[str, ...], ReshardPlan] = {}  # by the other workers' names
        self._legs: dict[str, RequestLeg] = {}  # by vLLM's request id
        self._lookups: dict[str, RequestLeg] = {}  # by transfer id, while LOOKING_UP
        self._used_grants: set[tuple[str, str]] = set()  # (kind of use, transfer id)
        self._grant_expiries: list[tuple[float, tuple[str, str]]] = []  # the same, as a heap
        self._started_at = time.monotonic()
        self._next_step = StepMetadata()
        self.engine: EngineInfo | None = None

    def set_workers(self, handshakes: Sequence[Handshake]) -> None:
        """Describes this engine from the handshakes of all its ranks.

        `handshakes`: by pipeline stage, then by tensor parallel rank. The ranks of one stage hold
        the same layers.
        """
        names = "".join(handshake.worker.name for handshake in handshakes)
        layer_numbers: dict[str, int] = {}  # by name, in the model
        form_counts: Counter[str] = Counter()
        workers = []
        for handshake in handshakes:
            holds = handshake.worker.holds
            for name, layer in zip(handshake.layers, holds.layers, strict=True):
                if name not in layer_numbers:
                    kind = holds.kinds[layer]
                    form_counts[f"{kind.total_heads} heads of {kind.fingerprint}"] += 1
                layer_numbers.setdefault(name, len(layer_numbers))
            first = layer_numbers[handshake.layers[0]] if handshake.layers else 0
            holds = msgspec.structs.replace(holds, first=first)
            workers.append(msgspec.structs.replace(handshake.worker, holds=holds))
        digest = hashlib.sha256(" ".join(layer_numbers).encode()).hexdigest()[:12]
        forms = [f"{count} layers of {form}" for form, count in sorted(form_counts.items())]
        self.engine = EngineInfo(
            incarnation=hashlib.sha256(names.encode()).hexdigest()[:16],
            role=self._role,  # type: ignore[arg-type]
            workers=workers,
            layout={
                **self._layout,
                "layers": f"{len(layer_numbers)} ({digest})",
                "KV of a token": "; ".join(forms),
            },
            rank=self._rank,
            two_way=self._permits_reuse,
        )
        log.info(
            "engine %s (role %s): ready for KV transfers with %d workers",
            self.engine.incarnation,
            self._role,
            len(workers),
        )

    # Start of a request ---------------------------------------------------------------------------
    def leg_of(self, request: Request, *, before_lookup: bool = False) -> RequestLeg | None:
        """Returns the leg of a request, made at the first call; None for a request without a grant.

        A grant that can be read but is not valid here makes a leg with `is_refused`.
        `before_lookup`: vLLM has not looked the prompt up in its prefix cache yet.
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
            self._log_refusal(request, error)
            request.kv_transfer_params = None  # refuse and log once, not at each of vLLM's calls
            return None
        try:
            self._check_grant(grant)
        except BadGrant as error:
            self._log_refusal(request, error)
            leg = RequestLeg(grant, request.num_prompt_tokens, "", state=LegState.LOCAL)
            leg.is_refused = True
            self._legs[request.request_id] = leg
            return leg
        leg = self._new_leg(request, grant, before_lookup=before_lookup)
        self._legs[request.request_id] = leg
        return leg

    @staticmethod
    def _log_refusal(request: Request, error: BadGrant) -> None:
        log.warning(
            "request %s: grant refused (%s); this engine computes it without a KV transfer",
            request.request_id,
            error,
        )

    def _new_leg(self, request: Request, grant: Grant, *, before_lookup: bool) -> RequestLeg:
        if grant.leg == "decode":
            plan: ReshardPlan | None = self._reshard_plan(grant.sources)
        else:
            plan = self._reuse_plan(grant)
        if grant.leg == "probe":
            return RequestLeg(
                grant, request.num_prompt_tokens, "", plan, reuse=self._new_reuse(grant, plan)
            )
        digest = prompt_digest.digest_prompt(request)
        generates_one = compat.generates_one(request)
        # When P's request ends, vLLM frees blocks that no token after the prompt looks back to. D
        # computes the prompt's last token again, which looks back one token further. That token
        # may be in one block more, so P leaves out the last token of the prompt too.
        leaves_out_last = self._has_states or (before_lookup and self._tokens_left_out)
        if (
            digest
            and grant.leg == "prefill"
            and request.num_prompt_tokens > 1
            and leaves_out_last
            and generates_one
        ):
            compat.leave_out_last(request)
        leg = RequestLeg(grant, request.num_prompt_tokens, digest, plan)
        leg.reuse = self._new_reuse(grant, plan)
        if grant.leg == "decode":
            self._next_step.loading_requests[grant.transfer] = request.request_id
        else:
            self._next_step.serving_requests[grant.transfer] = request.request_id
        obstacle = ""
        if not digest:
            obstacle = "the inputs of its prompt cannot be compared between engines"
        elif grant.leg == "prefill" and self._tokens_left_out and not generates_one:
            # vLLM would cache a second token under the hash of the token that was left out.
            obstacle = "with sliding windows or SSM states a prefill leg must have max_tokens 1"
        if obstacle:
            log.warning(
                "request %s: %s; this engine computes it without a KV transfer",
                request.request_id,
                obstacle,
            )
            self._refuse_transfer(leg)
        return leg

    def _new_reuse(self, grant: Grant, plan: ReshardPlan | None) -> ReuseState:
        """Returns NEW if this leg may reuse KV, else ENDED; uses up the reuse's transfer id."""
        if not grant.back or not self._permits_reuse or not plan or grant.back == grant.transfer:
            return ReuseState.ENDED
        try:
            self._use_grant("back", grant.back, grant.until)
        except BadGrant:
            return ReuseState.ENDED
        return ReuseState.NEW

    def _refuse_transfer(self, leg: RequestLeg) -> None:
        """Makes a leg an ordinary request, and informs the other engine at once."""
        self._end_reuse(leg)
        if leg.grant.leg == "decode":
            self._skip_load(leg)
        else:
            self._revoke_blocks(leg)

    def _check_grant(self, grant: Grant) -> None:
        """Raises BadGrant unless the grant is for this engine, valid now, and not used yet."""
        if grant.leg == "probe" and not grant.engine:
            return
        if self.engine is None or grant.engine != self.engine.incarnation:
            raise BadGrant("for another engine, or for this one before its restart")
        if grant.leg != "probe" and self._role not in (grant.leg, "both"):
            raise BadGrant(f"a {grant.leg} leg, but this engine's role is {self._role}")
        self._use_grant(grant.leg, grant.transfer, grant.until)
        try:
            self._check_sources(self.engine, grant)
        except BadGrant:
            if grant.leg == "prefill":  # so that D does not wait for it
                self._next_step.sender_events.append(events.BlocksRevoked(grant.transfer))
            raise

    def _check_sources(self, engine: EngineInfo, grant: Grant) -> None:
        """Raises BadGrant for workers that this engine must not read from, before it dials one."""
        names = {worker.name for worker in grant.sources}
        if len(names) < len(grant.sources):
            raise BadGrant("names one worker twice")
        if names & {worker.name for worker in engine.workers}:
            raise BadGrant(
                "names this engine's own workers: it cannot be both engines of a request"
            )
        # A prefill leg runs without reuse as well: see `_reuse_plan`.
        if grant.leg != "decode":
            return
        if refusal := dialling.refusal(grant.sources, loopback_only=self._loopback_only):
            raise BadGrant(refusal)
        try:
            self._reshard_plan(grant.sources)
        except Unmappable as error:
            raise BadGrant(f"the KV of P cannot be read here: {error}") from None

    @property
    def clock(self) -> float:
        """Seconds since the start of this engine; grants expire by this clock."""
        return time.monotonic() - self._started_at

    def _use_grant(self, use: str, transfer: str, until: float) -> None:
        """Uses up a transfer id for one kind of use; BadGrant if it was used or is out of time.

        `use`: probe, prefill, decode or back. `until`: by `clock`.
        """
        now = self.clock
        while self._grant_expiries and self._grant_expiries[0][0] < now:
            _, expired = heapq.heappop(self._grant_expiries)
            self._used_grants.discard(expired)
        if until < now:
            raise BadGrant(f"expired {now - until:.1f} s ago")
        if until > now + MAX_VALIDITY_SECONDS:
            raise BadGrant(f"valid for {until - now:.0f} s, which is too long")
        if use == "probe":  # changes nothing, so it may be repeated
            return
        if (use, transfer) in self._used_grants:
            raise BadGrant("used before")
        # No used grant is forgotten to make room: it would become valid again.
        if len(self._used_grants) >= MAX_USED_GRANTS:
            raise BadGrant("too many other grants are valid now")
        self._used_grants.add((use, transfer))
        # Without a key every client can mint grants, also one that expires before its transfer
        # ends.
        expires_at = until if self._key.is_set else now + MAX_VALIDITY_SECONDS
        heapq.heappush(self._grant_expiries, (expires_at, (use, transfer)))

    def _reshard_plan(self, sources: Sequence[WorkerInfo]) -> ReshardPlan:
        """Returns which of our ranks reads what of these workers; Unmappable if none can be."""
        assert self.engine is not None
        names = tuple(worker.name for worker in sources)
        if names not in self._plans:
            own_layouts = [worker.holds for worker in self.engine.workers]
            source_layouts = [worker.holds for worker in sources]
            self._plans[names] = reshard.plan(source_layouts, own_layouts)
            if len(self._plans) > MAX_CACHED_PLANS:
                del self._plans[next(iter(self._plans))]
        return self._plans[names]

    def _reuse_plan(self, grant: Grant) -> ReshardPlan | None:
        """Returns the plan by which a prefill leg reads from D; None if it runs without reuse."""
        if not grant.back:
            return None
        if refusal := dialling.refusal(grant.sources, loopback_only=self._loopback_only):
            log.warning(
                "transfer %s: KV cached at D is not reused (%s); P computes the whole prompt",
                grant.transfer,
                refusal,
            )
            return None
        try:
            return self._reshard_plan(grant.sources)
        except Unmappable as error:
            log.warning(
                "transfer %s: KV cached at D cannot be read (%s); P computes the whole prompt",
                grant.transfer,
                error,
            )
            return None

    # Decode leg -----------------------------------------------------------------------------------
    def tokens_to_load(self, request: Request, cached_tokens: int) -> int | None:
        """Returns how many prompt tokens come from the other engine; None if not known yet.

        `cached_tokens`: the tokens before them, from this engine's prefix cache.

        Also returns None once after a load has ended, for the sake of loads that failed. vLLM looks
        at requests with loads before all others, and stops at one that needs more blocks than are
        free. After a failed load the request holds no block. With sliding windows it needs more
        blocks to compute than to load. In front of the requests that hold the pool it would block
        vLLM forever. None moves it behind them, and they can run. Once is enough; more often would
        let a stream of new loads starve it.
        """
        leg = self.leg_of(request)
        if leg is None:
            return 0
        if leg.yields_turn:
            leg.yields_turn = False
            return None
        if leg.state is not LegState.NEW:
            return 0
        if leg.grant.leg != "decode":
            return self._tokens_to_reuse(leg, cached_tokens)
        leg.cached_tokens = cached_tokens
        missing = leg.prompt_tokens - self._tokens_left_out - cached_tokens
        # With all whole blocks cached, computing the rest is faster than reading it, and part of
        # it must be computed anyway.
        is_nearly_cached = cached_tokens > 0 and missing <= max(self._block_sizes)
        return 0 if missing <= 0 or is_nearly_cached else missing

    def on_blocks_allocated(
        self, request: Request, blocks: Sequence[list[int]], tokens_to_load: int
    ) -> None:
        """Starts the load of a request, or serves its cached blocks.

        `blocks`: ids by KV-cache group, of the whole request.
        """
        leg = self._legs.get(request.request_id)
        if leg is None or leg.state is not LegState.NEW:
            return
        if leg.grant.leg != "decode":
            self._start_reuse_load(leg, request.request_id, blocks, tokens_to_load)
            return
        self._serve_cached_blocks(leg, blocks)
        if tokens_to_load == 0:
            self._skip_load(leg)
            return
        leg.state = LegState.LOADING
        token_end = leg.prompt_tokens - self._tokens_left_out
        self._request_load(
            leg,
            leg.grant.transfer,
            blocks,
            tokens_to_load,
            token_end,
            patience=leg.grant.patience,
        )

    def _request_load(
        self,
        leg: RequestLeg,
        transfer: str,
        blocks: Sequence[list[int]],
        tokens_to_load: int,
        token_end: int,
        *,
        patience: float,
    ) -> None:
        """Has the workers read the last `tokens_to_load` tokens before `token_end`.

        `patience`: seconds without progress after which the load fails.
        """
        assert leg.plan is not None  # of a decode leg, or of a prefill leg that reuses KV
        token = token_end - tokens_to_load
        group_blocks = [
            _blocks_of_tokens(ids, block_size, token, token_end)
            for block_size, ids in zip(self._block_sizes, blocks, strict=True)
        ]
        self._next_step.receiver_events.append(
            events.LoadRequested(
                transfer,
                leg.grant.sources,
                leg.plan,
                group_blocks,
                token_end,
                patience,
                leg.digest,
            )
        )

    def on_load_finished(self, request_id: str) -> None:
        """Makes a loading leg an ordinary request, after a success or a failure."""
        leg = self._legs.get(request_id)
        if leg is None:
            return
        leg.yields_turn = True
        if leg.state is LegState.LOADING:
            leg.state = LegState.LOCAL
            # After a failure vLLM frees the blocks; after a success P has read all that it needs.
            self._end_reuse(leg)
        elif leg.reuse is ReuseState.READING:
            leg.reuse = ReuseState.ENDED

    def _skip_load(self, leg: RequestLeg) -> None:
        """Makes a decode leg an ordinary request, and has P release its blocks."""
        leg.state = LegState.LOCAL
        assert self.engine is not None  # else the grant would have been refused
        empty_plan = reshard.nothing(len(leg.grant.sources), len(self.engine.workers))
        self._next_step.receiver_events.append(
            events.LoadSkipped(leg.grant.transfer, leg.grant.sources, empty_plan)
        )

    # Bidirectional KV reuse -----------------------------------------------------------------------
    def _serve_cached_blocks(self, leg: RequestLeg, blocks: Sequence[list[int]]) -> None:
        """Lets P read the blocks that a decode leg has from its prefix cache.

        The request holds these blocks until it is preempted or ends.
        """
        if leg.reuse is not ReuseState.NEW:
            return
        cached_blocks = []
        is_complete = leg.cached_tokens > 0
        for block_size, ids in zip(self._block_sizes, blocks, strict=True):
            cached = list(ids[: leg.cached_tokens // block_size])
            cached_blocks.append(cached)
            # MultiConnector passes no blocks to connectors that load nothing.
            if len(cached) * block_size < leg.cached_tokens:
                is_complete = False
        if not is_complete:
            self._end_reuse(leg)
            return
        leg.reuse = ReuseState.SERVING
        assert leg.grant.back is not None
        self._next_step.sender_events.append(
            events.BlocksScheduled(
                leg.grant.back, leg.cached_tokens, cached_blocks, cached=True, prompt=leg.digest
            )
        )

    def on_request_arrived(self, request: Request) -> None:
        """Makes the leg of a new request; a prefill leg starts its lookup at D.

        An early lookup is answered by the time the request's turn comes.
        """
        leg = self.leg_of(request, before_lookup=True)
        if leg is None or leg.grant.leg != "prefill" or leg.reuse is not ReuseState.NEW:
            return
        if not leg.grant.back or not leg.plan:
            return
        leg.reuse = ReuseState.LOOKING_UP
        self._lookups[leg.grant.back] = leg
        self._next_step.receiver_events.append(
            events.LookupRequested(leg.grant.back, leg.grant.sources, leg.plan, leg.digest)
        )

    def _tokens_to_reuse(self, leg: RequestLeg, cached_tokens: int) -> int | None:
        """Returns how many tokens a prefill leg reads from D; None while the lookup runs."""
        if leg.reuse is not ReuseState.LOOKING_UP:
            return 0
        # The limit counts from the request's first turn: time in vLLM's queue costs nothing.
        leg.lookup_deadline = leg.lookup_deadline or time.monotonic() + REUSE_LOOKUP_SECONDS
        assert self.engine is not None  # else the grant would have been refused
        is_answered = len(leg.lookup_counts) >= len(self.engine.workers)
        if not is_answered and time.monotonic() < leg.lookup_deadline:
            return None
        tokens_at_d = min(leg.lookup_counts) if is_answered else 0
        # At least one token of the prompt must be computed here.
        if cached_tokens < tokens_at_d < leg.prompt_tokens:
            return tokens_at_d - cached_tokens
        self._end_reuse(leg)
        return 0

    def on_lookup_counts(self, lookup_counts: dict[str, list[int]]) -> None:
        """Adds the answers of lookups: tokens at D by transfer, one count for each rank."""
        for transfer, counts in lookup_counts.items():
            leg = self._lookups.get(transfer)
            if leg is not None:
                leg.lookup_counts += counts

    def _start_reuse_load(
        self, leg: RequestLeg, request_id: str, blocks: Sequence[list[int]], tokens_to_load: int
    ) -> None:
        """Has the workers of a prefill leg read from D, or ends the reuse."""
        if leg.reuse is not ReuseState.LOOKING_UP or not tokens_to_load:
            self._end_reuse(leg)
            return
        transfer = leg.grant.back
        assert transfer is not None
        leg.reuse = ReuseState.READING
        del self._lookups[transfer]
        self._next_step.loading_requests[transfer] = request_id
        self._request_load(
            leg,
            transfer,
            blocks,
            tokens_to_load,
            token_end=min(leg.lookup_counts),
            patience=REUSE_STALL_SECONDS,
        )

    def _end_reuse(self, leg: RequestLeg) -> None:
        """Ends a leg's reuse in any state, and informs the workers if they take part."""
        before = leg.reuse
        leg.reuse = ReuseState.ENDED
        transfer = leg.grant.back
        if before is ReuseState.ENDED or transfer is None:
            return
        self._lookups.pop(transfer, None)
        if leg.grant.leg == "decode":
            self._next_step.sender_events.append(events.BlocksRevoked(transfer))
        elif before is not ReuseState.NEW:
            self._next_step.receiver_events.append(events.LoadCancelled(transfer))

    # Prefill leg ----------------------------------------------------------------------------------
    def build_step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Returns the events for the workers that go with this step, and collects anew.

        Sleeps `IDLE_STEP_SLEEP_SECONDS` if the step computes nothing and a leg waits for KV.
        """
        for request_id in output.preempted_req_ids or ():
            self._revoke_blocks(self._legs.get(request_id))
        if self._legs:
            for new in output.scheduled_new_reqs:
                self._announce_blocks(output, new.req_id, new.num_computed_tokens, new.block_ids)
            cached = output.scheduled_cached_reqs
            for request_id, computed_tokens, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                self._announce_blocks(output, request_id, computed_tokens, blocks)
        metadata = self._next_step
        self._next_step = StepMetadata()
        computes_nothing = not output.num_scheduled_tokens
        if computes_nothing and any(leg.waits_for_kv for leg in self._legs.values()):
            time.sleep(IDLE_STEP_SLEEP_SECONDS)
        return metadata

    def _announce_blocks(
        self,
        output: SchedulerOutput,
        request_id: str,
        computed_tokens: int,
        blocks: tuple[list[int], ...] | None,
    ) -> None:
        """Announces the blocks that a prefill leg got in this step; None: no new ones."""
        leg = self._legs.get(request_id)
        if leg is None or leg.grant.leg != "prefill" or leg.state is LegState.LOCAL:
            return
        if leg.announced_tokens >= leg.prompt_tokens:  # generated tokens are not transferred
            return
        leg.state = LegState.COMPUTING
        end = computed_tokens + output.num_scheduled_tokens[request_id]
        leg.announced_tokens = min(leg.prompt_tokens, end)
        new_blocks = [list(ids) for ids in blocks or [()] * len(self._block_sizes)]
        self._next_step.sender_events.append(
            events.BlocksScheduled(
                leg.grant.transfer, leg.announced_tokens, new_blocks, prompt=leg.digest
            )
        )

    def _revoke_blocks(self, leg: RequestLeg | None) -> None:
        """Stops serving a leg's blocks: vLLM has taken them back, read by the receiver or not."""
        if leg is None:
            return
        self._end_reuse(leg)
        if leg.grant.leg == "prefill" and leg.state is not LegState.LOCAL:
            leg.state = LegState.LOCAL
            self._next_step.sender_events.append(events.BlocksRevoked(leg.grant.transfer))

    # End of a request -----------------------------------------------------------------------------
    def on_request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Ends a leg; returns (whether vLLM keeps its blocks, `kv_transfer_params` of the answer).

        Kept blocks are freed when the workers report the transfer as sent.
        """
        self.leg_of(request)  # the request may end before it was scheduled
        leg = self._legs.pop(request.request_id, None)
        if leg is None:
            return False, None
        self._end_reuse(leg)
        if leg.grant.leg == "decode":
            if leg.state is LegState.LOADING:
                self._next_step.receiver_events.append(events.LoadCancelled(leg.grant.transfer))
            elif leg.state is LegState.NEW:
                self._skip_load(leg)
            return False, None
        answer = {ANSWER_KEY: self._engine_description(leg)}
        if leg.grant.leg == "probe" or leg.is_refused:
            return False, answer
        has_whole_prompt = (
            leg.state is LegState.COMPUTING and leg.announced_tokens >= leg.prompt_tokens
        )
        if not has_whole_prompt or request.status.name not in NORMAL_FINISH_STATUSES:
            self._revoke_blocks(leg)
            return False, answer
        self._next_step.sender_events.append(events.PrefillFinished(leg.grant.transfer))
        return True, answer

    def _engine_description(self, leg: RequestLeg) -> Any:
        """Returns this engine's description for the answer of a prefill leg or a probe.

        A request without a valid grant for this engine gets no addresses, only an `EngineCard`.
        """
        if self.engine is None:
            return None
        if leg.is_refused or not leg.grant.engine:
            card = EngineCard(self.engine.incarnation, self.clock, self.engine.rank)
            return msgspec.to_builtins(card)
        return msgspec.to_builtins(msgspec.structs.replace(self.engine, clock=self.clock))
