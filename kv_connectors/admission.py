"""Admission: which requests of vLLM take part in a transfer, and by which facts.

    from our proxy        a grant in `kv_transfer_params`, of a leg or of a probe
    from another router   a prefill leg without a grant, which gets a handover in its answer, or a
                          decode leg with that handover

All other content of `kv_transfer_params` is ignored. A request of kind `probe` only requests the
engine's description.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vllm_disagg.errors import BadGrant, Unmappable
from vllm_disagg.fleet import handovers
from vllm_disagg.fleet.grant_checks import GrantChecker
from vllm_disagg.fleet.grants import REQUEST_KEY, Grant, new_transfer, verify
from vllm_disagg.fleet.handovers import Handover
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.used_grants import UsedGrants
from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.protocol.request_leg import LegFacts
from vllm_disagg.warning_limit import WarningLimit

from . import compat, prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.scheduler")

LegName = Literal["prefill", "decode"]


@dataclass(frozen=True)
class AdmittedRequest:
    """A request with parameters of a transfer, valid or not."""

    grant: Grant | None = None  # None: of another router, or not readable
    facts: LegFacts | None = None  # of its leg; None for a probe, and for a refused request
    leg: LegName | None = None  # None for a probe, and for a refused request
    # Why it is computed here: its leg ends at once, and the other engine is informed.
    obstacle: str = ""
    is_refused: bool = False  # the parameters were not valid; the request is an ordinary one
    refusal: str = ""  # why a token is no grant of this fleet, for the answer
    has_waiting_receivers: bool = False  # D may wait for the transfer of a refused grant

    @property
    def is_computed_here(self) -> bool:
        """Whether its leg has no transfer, although its parameters are valid."""
        return bool(self.obstacle)

    @property
    def is_handed_over(self) -> bool:
        """Whether it is a leg of the standard handshake, from another router."""
        return self.leg is not None and self.grant is None


class Admission:
    """Reads the grants of one engine's requests."""

    def __init__(
        self,
        key: FleetKey,
        *,
        has_states: bool,
        leaves_out_last: bool,
        loopback_only: bool,
        patience: float,
    ) -> None:
        """Creates the admission of an engine whose workers are not known yet.

        `has_states`: the model has SSM states. `leaves_out_last`: the last token of a prompt is
        not transferred. `loopback_only`: the engine dials no other machine. `patience`: the seconds
        without progress after which D's load of a handed-over prompt fails.
        """
        self._key = key
        self.computes_seeded = False  # whether requests with a seed have no transfer
        self.computes_images = False  # whether requests with images and the like have none
        self._has_states = has_states
        self._leaves_out_last = leaves_out_last
        self._loopback_only = loopback_only
        self._patience = patience
        self._used = UsedGrants(has_key=key.is_set)
        self._checker: GrantChecker | None = None
        self._without_transfer = WarningLimit()
        self._without_reuse = WarningLimit()

    def set_engine(self, engine: EngineInfo) -> None:
        """Accepts grants for this engine from now on; used ones stay used."""
        self._checker = GrantChecker(engine, self._used, loopback_only=self._loopback_only)

    @property
    def engine(self) -> EngineInfo | None:
        """The description of the engine; None before `set_engine`."""
        return self._checker.engine if self._checker is not None else None

    def admit(self, request: Request, now: float, *, before_lookup: bool) -> AdmittedRequest | None:
        """Returns the request with its parameters, which are used up; None without any.

        `now`: by the engine's clock. `before_lookup`: vLLM has not looked the prompt up in its
        prefix cache yet.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return None
        try:
            admitted = self._admit_valid(request, params, now, before_lookup=before_lookup)
        except BadGrant as error:
            self._log_without_transfer(request, f"parameters refused ({error})", now)
            refusal = str(error) if REQUEST_KEY in params else ""
            return AdmittedRequest(is_refused=True, refusal=refusal)
        if admitted is not None and admitted.obstacle:
            self._log_without_transfer(request, admitted.obstacle, now)
        return admitted

    def _admit_valid(
        self, request: Request, params: Mapping[str, object], now: float, *, before_lookup: bool
    ) -> AdmittedRequest | None:
        """Returns the request of valid parameters; None if they are none of a transfer.

        Raises BadGrant.
        """
        if REQUEST_KEY in params:
            grant = verify(self._key, params[REQUEST_KEY])
            return self._admit_grant(request, grant, now, before_lookup=before_lookup)
        if handovers.is_prefill_leg(params):
            return self._admit_handover(request, before_lookup=before_lookup)
        if handovers.is_decode_leg(params):
            return self._admit_handed_over(request, params, now)
        return None

    def _admit_grant(
        self, request: Request, grant: Grant, now: float, *, before_lookup: bool
    ) -> AdmittedRequest:
        """Returns the request of a grant, which may be refused."""
        has_waiting_receivers = False
        try:
            if grant.leg == "probe":
                self._check_probe(grant, now)
                return AdmittedRequest(grant)
            checker = self._require_checker()
            checker.use_leg(grant, now)
            has_waiting_receivers = grant.leg == "prefill"
            checker.check_sources(grant)
        except BadGrant as error:
            self._log_without_transfer(request, f"parameters refused ({error})", now)
            return AdmittedRequest(
                grant, is_refused=True, has_waiting_receivers=has_waiting_receivers
            )
        digest = prompt_digest.digest_prompt(request)
        plan: ReshardPlan | None
        sources = grant.sources
        if grant.leg == "decode":
            plan = checker.plan_reads(sources)
            sources = checker.share_sources(sources)
        else:
            plan = self._plan_reuse(grant, checker, now)
        facts = LegFacts(
            request=request.request_id,
            transfer=grant.transfer,
            prompt_tokens=request.num_prompt_tokens,
            adapter=prompt_digest.cache_name(request.lora_request),
            digest=digest,
            sources=sources,
            plan=plan,
            stall_timeout=grant.patience,
            reuse=checker.use_reuse(grant, now) if plan is not None else None,
        )
        if grant.leg == "prefill":
            return self._admit_prefill(request, facts, grant, before_lookup=before_lookup)
        return self._admit_decode(request, facts, grant)

    def _admit_handover(self, request: Request, *, before_lookup: bool) -> AdmittedRequest:
        """Returns a router's prefill leg, for whose transfer this engine chooses the name."""
        self._checker_with_workers().check_role("prefill")
        facts = LegFacts(
            request=request.request_id,
            transfer=new_transfer(),
            prompt_tokens=request.num_prompt_tokens,
            adapter=prompt_digest.cache_name(request.lora_request),
            digest=prompt_digest.digest_prompt(request),
            sources=[],
            plan=None,
            stall_timeout=self._patience,
            is_handover=True,
        )
        return self._admit_prefill(request, facts, None, before_lookup=before_lookup)

    def _admit_handed_over(
        self, request: Request, params: Mapping[str, object], now: float
    ) -> AdmittedRequest:
        """Returns a router's decode leg; uses up its handover."""
        if handovers.TOKEN_KEY not in params:
            raise BadGrant("from a prefill engine with another connector")
        handover = handovers.verify(self._key, params[handovers.TOKEN_KEY])
        checker = self._checker_with_workers()
        digest = prompt_digest.digest_prompt(request)
        checker.use_handover(handover, digest, now)
        facts = LegFacts(
            request=request.request_id,
            transfer=handover.transfer,
            prompt_tokens=request.num_prompt_tokens,
            digest=digest,
            sources=checker.share_sources(handover.sources),
            plan=checker.plan_reads(handover.sources),
            stall_timeout=handover.patience,
        )
        return self._admit_decode(request, facts, None)

    def handover_token(self, facts: LegFacts) -> str:
        """Returns the token by which D may load a prompt that this engine has computed."""
        engine = self._checker_with_workers().engine
        handover = Handover(
            handovers.VERSION,
            transfer=facts.transfer,
            prompt=facts.digest,
            sources=engine.workers,
            layout=engine.layout,
            patience=facts.stall_timeout,
        )
        return handovers.mint(self._key, handover)

    def end_handover(self, transfer: str, now: float) -> None:
        """Forgets a used handover after a while: its leg and its load have ended."""
        self._checker_with_workers().end_handover(transfer, now)

    def _log_without_transfer(self, request: Request, reason: str, now: float) -> None:
        """Logs a request with parameters that has no transfer.

        The first in a while is a WARNING, the others INFO: any client can send such requests.
        """
        _log_limited(
            self._without_transfer.note(now),
            f"request {request.request_id}: {reason};"
            " this engine computes it without a KV transfer",
        )

    def _plan_reuse(self, grant: Grant, checker: GrantChecker, now: float) -> ReshardPlan | None:
        """Returns the plan by which a prefill leg reads from D; None if it runs without reuse.

        The first refusal in a while is a WARNING, the others INFO: each later turn has one.
        """
        if not grant.back:
            return None
        try:
            return checker.plan_reuse(grant)
        except (BadGrant, Unmappable) as error:
            _log_limited(
                self._without_reuse.note(now),
                f"transfer {grant.transfer}: KV cached at D is not reused ({error});"
                " P computes the whole prompt",
            )
            return None

    def _check_probe(self, grant: Grant, now: float) -> None:
        """Raises BadGrant for a probe that names an engine, unless it is for this one."""
        if not grant.engine:
            return
        self._require_checker().check_probe(grant, now)

    def _require_checker(self) -> GrantChecker:
        """Returns the checks of this engine; raises BadGrant before its workers are known."""
        if self._checker is None:
            raise BadGrant("for another engine, or for this one before its restart")
        return self._checker

    def _checker_with_workers(self) -> GrantChecker:
        """Returns the checks of this engine; raises BadGrant while it makes no transfers."""
        if self._checker is None:
            raise BadGrant("this engine makes no KV transfers")
        return self._checker

    def _admit_prefill(
        self, request: Request, facts: LegFacts, grant: Grant | None, *, before_lookup: bool
    ) -> AdmittedRequest:
        """Returns a prefill leg's request, which may leave out the last token of the prompt."""
        generates_one = compat.generates_one(request)
        obstacle = self._obstacle(request, facts)
        if not obstacle and not generates_one and grant is None:
            # vLLM keeps the blocks of all its tokens until D has read the prompt. Any client may
            # send this, and the limit of unclaimed prompts counts those of the prompt only.
            obstacle = "the standard handshake is for prefill legs with max_tokens 1"
        elif not obstacle and not generates_one and self._leaves_out_last:
            # vLLM would cache a second token under the hash of the token that was left out.
            obstacle = "with sliding windows or SSM states a prefill leg must have max_tokens 1"
        # When P's request ends, vLLM frees blocks that no token after the prompt looks back to. D
        # computes the prompt's last token again, which looks back one token further. That token
        # may be in one block more, so P leaves out the last token of the prompt too.
        leaves_out_last = self._has_states or (before_lookup and self._leaves_out_last)
        is_left_out = not obstacle and generates_one and leaves_out_last
        is_left_out = is_left_out and request.num_prompt_tokens > 1
        if is_left_out:
            compat.leave_out_last(request)
        # Of a vLLM without the hook before the lookup, P computes a token that D does not read.
        writes_more = not generates_one or (self._leaves_out_last and not is_left_out)
        facts = replace(facts, prompt_tokens=request.num_prompt_tokens, writes_more=writes_more)
        return _admitted(request, facts, grant, "prefill", obstacle)

    def _admit_decode(
        self, request: Request, facts: LegFacts, grant: Grant | None
    ) -> AdmittedRequest:
        """Returns a decode leg's request."""
        obstacle = self._obstacle(request, facts)
        if not obstacle and compat.needs_whole_prompt(request):
            obstacle = "what it asks about its prompt needs the whole prompt computed"
        return _admitted(request, facts, grant, "decode", obstacle)

    def _obstacle(self, request: Request, facts: LegFacts) -> str:
        """Returns why a leg of either kind has no transfer; empty if it may have one."""
        if not facts.digest:
            return "the inputs of its prompt cannot be compared between engines"
        if self.computes_seeded and compat.is_seeded(request):
            # vLLM takes more random numbers in the step that follows loaded KV. A plain vLLM, too,
            # gives a prompt of its cache other tokens then.
            return "with speculative decoding a seed has an effect only if nothing is loaded"
        if self.computes_images and request.mm_features:
            # Which tokens of an image attend to which depends on the steps that computed it.
            return "in this model the tokens of an image attend to later ones"
        if self._leaves_out_last and compat.ends_in_image(request):
            return "with sliding windows or SSM states a prompt must not end in an image"
        return ""


def _log_limited(count: int, line: str) -> None:
    """Logs a line, as a WARNING if its limit gave a count of causes to warn of."""
    log.log(
        logging.WARNING if count else logging.INFO,
        "%s%s",
        line,
        f" ({count - 1} more since the last warning)" if count > 1 else "",
    )


def _admitted(
    request: Request, facts: LegFacts, grant: Grant | None, leg: LegName, obstacle: str
) -> AdmittedRequest:
    """Returns a leg's request. `obstacle`: why it is computed without a transfer, or empty."""
    if not obstacle:
        # The one line by which each leg is found, also in the log of an engine that dies.
        log.info("request %s: %s leg of transfer %s", request.request_id, leg, facts.transfer)
    return AdmittedRequest(grant, facts, leg, obstacle)
