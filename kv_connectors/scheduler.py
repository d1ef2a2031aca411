"""The scheduler's half of the connector: an adapter between vLLM's scheduler and `EngineLegs`.

Turns vLLM's objects into plain facts. Opens no socket and waits for no answer. Which requests take
part in a transfer: see `admission.py`. The order of vLLM's calls is at the head of
`vllm_disagg/protocol/legs.py`, the states of a request in `prefill_leg.py` and `decode_leg.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_disagg.fleet import dialling, handovers
from vllm_disagg.fleet.grants import ANSWER_KEY, REFUSED_KEY, WHOLE_KEY, Grant, new_transfer
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.protocol.legs import EngineLegs
from vllm_disagg.protocol.peers import EngineCard, EngineInfo
from vllm_disagg.protocol.request_leg import Blocks, CacheFacts
from vllm_disagg.warning_limit import WarningLimit

from . import compat, engine_description, prompt_digest
from .admission import Admission, AdmittedRequest
from .data_parallel import SharedServerRank
from .metadata import Handshake, StepMetadata
from .metrics import ConnectorStats
from .step_profile import StepProfile

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.scheduler")

# While all requests wait for KV, vLLM's engine loops in steps of about a millisecond, and may take
# the core that computes this very prefill. So an idle step sleeps; that delays a load by at most
# this time.
#
# The sleep is in the scheduler's process, although the workers could wait for an outcome and end
# earlier. On CPUs vLLM always runs its workers in processes, and a process that waits for another
# one spins for a second. While the scheduler sleeps, the workers spin, on the cores to which they
# are pinned. While the workers waited, the scheduler would spin, on any core.
#
# Data parallel ranks that compute in step do not sleep: all others wait for the dummy batch that
# vLLM computes after such a step.
IDLE_STEP_SLEEP_SECONDS = 0.002
NORMAL_FINISH_STATUSES = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


@dataclass(frozen=True)
class TransferLimits:
    """What the transfers of one engine may do."""

    bidirectional_reuse: bool = True  # False forbids it; some kinds of KV forbid it as well
    handover_patience: float = 10.0  # seconds without progress after which D's load fails
    # Blocks that prompts handed over to other engines may hold together; None: no limit.
    handover_blocks: int | None = None
    # Blocks that one load may take so that vLLM ever begins it; None: no limit.
    load_blocks: int | None = None
    may_sleep: bool = True  # in a step that computes nothing, while a leg waits for KV


class SchedulerSide:
    """Turns vLLM's calls into those of the machine, and the machine's events into metadata."""

    def __init__(
        self,
        key: FleetKey,
        role: str,
        layout: dict[str, str],
        groups: Sequence[KVCacheGroupSpec],
        *,
        rank: SharedServerRank | None = None,
        host: str = "127.0.0.1",
        limits: TransferLimits | None = None,
    ) -> None:
        """Creates the scheduler's half, without workers yet.

        `role`: prefill, decode or both. `layout`: the facts of `compatibility.layout`.
        `rank`: of an engine whose API server has several.
        `host`: the address of the workers themselves.
        """
        self._rank = rank
        self._role = role
        self._layout = layout
        limits = limits or TransferLimits()
        self._may_sleep = limits.may_sleep
        specs = compat.all_specs(groups)
        has_states = any(compat.is_state(spec) for spec in specs)
        windows = [compat.group_window(group) for group in groups]
        cache = CacheFacts(
            block_sizes=[group.kv_cache_spec.block_size for group in groups],
            tokens_left_out=int(has_states or any(windows)),
            windows=windows,
            max_handover_blocks=limits.handover_blocks,
            max_load_blocks=limits.load_blocks,
        )
        self._permits_reuse = limits.bidirectional_reuse and not cache.tokens_left_out
        loopback_only = not key.is_set or dialling.is_loopback(host)
        self._admission = Admission(
            key,
            has_states=has_states,
            leaves_out_last=bool(cache.tokens_left_out),
            loopback_only=loopback_only,
            patience=limits.handover_patience,
        )
        self._admitted: dict[str, AdmittedRequest] = {}  # by vLLM's request id
        # Transfers of handovers whose request was aborted while the workers still load, by request.
        self._aborted_loads: dict[str, str] = {}
        # When the KV of loads was in place at the ranks that have reported so far, by request.
        self._landed_at: dict[str, float] = {}
        self._missing_parameters = WarningLimit()
        self.stats = ConnectorStats()
        self._step_profile = StepProfile()
        self._legs = EngineLegs(cache)
        self._started_at = time.monotonic()

    def compute_seeded_requests(self) -> None:
        """Has requests with a seed computed here, without a transfer: see `admission.py`."""
        self._admission.computes_seeded = True

    def compute_image_requests(self) -> None:
        """Has requests with images and the like computed here: see `admission.py`."""
        self._admission.computes_images = True

    def set_workers(
        self,
        handshakes: Sequence[Handshake],
        failure_policy: str = "",
        *,
        plain_chat: bool = False,
        answer_settings: str = "",
        drains: bool = False,
    ) -> None:
        """Describes this engine from the handshakes of all its ranks, in the order of ranks.

        `failure_policy`: vLLM's setting for failed loads.
        `plain_chat`: no parser takes reasoning out of the text of its chats.
        `answer_settings`: the digest of `compatibility.answer_settings`.
        `drains`: SIGTERM lets its running requests finish.
        """
        engine = engine_description.describe(
            handshakes,
            self._role,
            self._layout,
            rank=self._rank,
            permits_reuse=self._permits_reuse,
            failure_policy=failure_policy,
            plain_chat=plain_chat,
        )
        computes_last_token = not self._legs.cache.tokens_left_out
        engine = msgspec.structs.replace(
            engine,
            answer_settings=answer_settings,
            computes_last_token=computes_last_token,
            drains=drains,
        )
        self._admission.set_engine(engine)
        log.info(
            "engine %s (role %s): ready for KV transfers with %d workers",
            engine.incarnation,
            self._role,
            len(engine.workers),
        )

    @property
    def engine(self) -> EngineInfo | None:
        """The description of this engine; None before the workers are known."""
        return self._admission.engine

    @property
    def clock(self) -> float:
        """Seconds since the start of this engine; grants expire by this clock."""
        return time.monotonic() - self._started_at

    # Start of a request ---------------------------------------------------------------------------
    def _admit(self, request: Request, *, before_lookup: bool = False) -> None:
        """Makes the leg of a request with a valid grant, at the first call for the request.

        `before_lookup`: vLLM has not looked the prompt up in its prefix cache yet.
        """
        if request.request_id in self._admitted:
            return
        admitted = self._admission.admit(request, self.clock, before_lookup=before_lookup)
        if admitted is None:
            return
        self._admitted[request.request_id] = admitted
        if admitted.is_refused:
            self.stats.count("refused_parameters")
        if admitted.facts is not None and admitted.leg == "decode":
            self._legs.add_decode(admitted.facts, self.clock)
        elif admitted.facts is not None:
            self._legs.add_prefill(admitted.facts)
        if admitted.is_computed_here:
            self._legs.refuse(request.request_id)
        if admitted.has_waiting_receivers and admitted.grant is not None:
            self._legs.refuse_transfer(admitted.grant.transfer)

    # vLLM's calls ---------------------------------------------------------------------------------
    def on_request_arrived(self, request: Request) -> None:
        """Makes the leg of a new request."""
        # vLLM's API server took the request then, by the clock of the day.
        arrived_at = getattr(request, "arrival_time", None)
        seconds = time.time() - arrived_at if arrived_at is not None else 0.0
        self._step_profile.on_arrived(request.request_id, time.monotonic(), seconds)
        self._admit(request, before_lookup=True)
        if request.request_id not in self._admitted:
            log.info("request %s: no grant; this engine computes it alone", request.request_id)
        self._legs.on_arrived(request.request_id)

    def tokens_to_load(self, request: Request, cached_tokens: int) -> int | None:
        """Returns how many prompt tokens come from the other engine; None if not known yet.

        `cached_tokens`: the tokens before them, from this engine's prefix cache.
        """
        self._admit(request)
        tokens = self._legs.tokens_to_load(request.request_id, cached_tokens, self.clock)
        # It may have waited for long. Its load would have the adapter as it was on arrival.
        if tokens and not prompt_digest.has_certain_adapter(request):
            log.info(
                "request %s: its adapter's files have changed since it came; this engine computes"
                " it without a KV transfer",
                request.request_id,
            )
            self._legs.refuse(request.request_id)
            return 0
        return tokens

    def on_blocks_allocated(
        self, request: Request, blocks: Sequence[list[int]], tokens_to_load: int
    ) -> Blocks:
        """Starts the load of a request, or serves its cached blocks.

        `blocks`: ids by KV-cache group, of the whole request. Returns those that vLLM takes as
        loaded and the load does not write.
        """
        if tokens_to_load:
            compat.count_own_cache_only(request)
        return self._legs.on_blocks_allocated(request.request_id, blocks, tokens_to_load)

    def on_kv_landed(self, landed_at: Mapping[str, float]) -> None:
        """Notes when loads ended at some ranks, by the clock of the day; the last one counts."""
        for request_id, moment in landed_at.items():
            self._landed_at[request_id] = max(moment, self._landed_at.get(request_id, moment))

    def on_load_finished(self, request_id: str) -> None:
        """Makes a loading leg an ordinary request, after a success or a failure."""
        landed_at = self._landed_at.pop(request_id, None)
        if landed_at is not None:
            self._step_profile.on_kv_landed(time.monotonic() - (time.time() - landed_at))
        self._legs.on_load_finished(request_id)
        transfer = self._aborted_loads.pop(request_id, None)
        if transfer is not None:
            self._admission.end_handover(transfer, self.clock)

    def on_released(self, request_ids: Iterable[str]) -> None:
        """Notes the requests whose blocks the workers have released."""
        for request_id in request_ids:
            self._legs.on_released(request_id)

    def on_lookup_counts(self, lookup_counts: dict[str, list[int]]) -> None:
        """Adds the answers of lookups: tokens at D by transfer, one count for each rank."""
        self._legs.on_lookup_counts(lookup_counts)

    def build_step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Returns the events for the workers that go with this step.

        Sleeps `IDLE_STEP_SLEEP_SECONDS` if the step computes nothing and a leg waits for KV, unless
        the limits forbid it.
        """
        self._step_profile.on_scheduled(output)
        for request_id in output.preempted_req_ids or ():
            self._legs.on_preempted(request_id)
            self._hand_over_again(request_id)
        if self._legs.legs:
            self._note_scheduled(output)
        self._legs.on_step_scheduled(self.clock, is_empty=not output.num_scheduled_tokens)
        events = self._legs.take_events()
        waits = not output.num_scheduled_tokens and self._legs.waits_for_kv
        if waits and self._may_sleep:
            time.sleep(IDLE_STEP_SLEEP_SECONDS)
        return StepMetadata(
            sender_events=events.for_sender,
            receiver_events=events.for_receiver,
            serving_requests=events.serving_requests,
            loading_requests=events.loading_requests,
        )

    def _hand_over_again(self, request_id: str) -> None:
        """Gives a preempted prompt of another router a new transfer.

        Its blocks are revoked under the old one's name, and D has not heard of either yet.
        """
        admitted = self._admitted.get(request_id)
        if admitted is None or not admitted.is_handed_over or admitted.leg != "prefill":
            return
        if admitted.facts is None or admitted.is_computed_here:
            return
        facts = replace(admitted.facts, transfer=new_transfer())
        self._admitted[request_id] = replace(admitted, facts=facts)
        self._legs.add_prefill(facts)

    def _note_scheduled(self, output: SchedulerOutput) -> None:
        """Passes the blocks that each request got in this step to the machine."""
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            token_end = new.num_computed_tokens + counts[new.req_id]
            self._legs.on_scheduled(new.req_id, token_end, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, computed_tokens, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            token_end = computed_tokens + counts[request_id]
            self._legs.on_scheduled(request_id, token_end, new_blocks)

    def on_step_ended(self) -> ConnectorStats | None:
        """Measures the step that has ended; returns the statistics since last time."""
        now = time.monotonic()
        self._step_profile.on_step_ended(now)
        self.stats.add_step_sums(*self._step_profile.take(now))
        return self.stats.take()

    # End of a request -----------------------------------------------------------------------------
    def on_request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Ends a leg; returns (whether vLLM keeps its blocks, `kv_transfer_params` of the answer).

        Kept blocks are freed when the workers report the transfer as sent.
        """
        self._step_profile.on_finished(request.request_id)
        self._admit(request)  # the request may end before it was scheduled
        admitted = self._admitted.pop(request.request_id, None)
        if admitted is None:
            params = request.kv_transfer_params
            if not (isinstance(params, dict) and WHOLE_KEY in params):
                self._note_missing_parameters()
            return False, None
        is_normal = request.status.name in NORMAL_FINISH_STATUSES
        is_loading = self._legs.is_loading(request.request_id)
        keeps_blocks = self._legs.on_finished(request.request_id, is_normal=is_normal)
        if admitted.is_handed_over and admitted.leg == "decode":
            self._end_handover(request.request_id, admitted, is_loading=is_loading)
        if admitted.is_handed_over and admitted.leg == "prefill":
            return keeps_blocks, self._handover(admitted, is_normal, keeps_blocks=keeps_blocks)
        if admitted.refusal:
            return False, {ANSWER_KEY: {REFUSED_KEY: admitted.refusal}}
        if admitted.grant is None or admitted.grant.leg == "decode":
            return False, None
        return keeps_blocks, {ANSWER_KEY: self._answer(admitted, admitted.grant)}

    def _note_missing_parameters(self) -> None:
        self.stats.count("requests_without_parameters")
        count = self._missing_parameters.note(self.clock)
        if count:
            log.warning(
                "requests without parameters of a KV transfer: %d since the last such line; this"
                " engine (role %s) computed them whole. If that is not meant, have the router send"
                " kv_transfer_params (docs/explanation/handshake.md)",
                count,
                self._role,
            )

    def _end_handover(
        self, request_id: str, admitted: AdmittedRequest, *, is_loading: bool
    ) -> None:
        """Lets the handover of a decode leg expire when the workers have ended its load."""
        assert admitted.facts is not None, "a leg has facts"
        transfer = admitted.facts.transfer
        # An aborted load goes on for a moment. A second one under its name would take its reports.
        if is_loading:
            self._aborted_loads[request_id] = transfer
        else:
            self._admission.end_handover(transfer, self.clock)

    def _handover(
        self, admitted: AdmittedRequest, is_normal: bool, *, keeps_blocks: bool
    ) -> dict[str, Any] | None:
        """Returns the parameters for D, which the router takes from a prefill leg's answer."""
        assert admitted.facts is not None, "a leg has facts"
        if keeps_blocks:
            return handovers.answer(self._admission.handover_token(admitted.facts))
        if is_normal and not admitted.is_computed_here:
            self.stats.count("withheld_handovers")
        return None

    def _answer(self, admitted: AdmittedRequest, grant: Grant) -> Any:
        """Returns this engine's description for the answer of a prefill leg or a probe.

        A request without a valid grant for this engine gets no addresses, only an `EngineCard`.
        """
        engine = self.engine
        if engine is None:
            return None
        if admitted.is_refused or not grant.engine:
            card = EngineCard(engine.incarnation, self.clock, engine.rank)
            return msgspec.to_builtins(card)
        return msgspec.to_builtins(msgspec.structs.replace(engine, clock=self.clock))
