"""Admission: which requests of vLLM take part in a transfer, and by which facts.

A request takes part only with a valid grant in `kv_transfer_params`; all other content there is
ignored. A request of kind `probe` only requests the engine's description.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_disagg.errors import BadGrant, Unmappable
from vllm_disagg.fleet.grant_checks import GrantChecker
from vllm_disagg.fleet.grants import REFUSED_KEY, REQUEST_KEY, Grant, verify
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.fleet.used_grants import UsedGrants
from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.protocol.request_leg import LegFacts

from . import compat, prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.scheduler")


@dataclass(frozen=True)
class AdmittedRequest:
    """A request with a readable grant."""

    grant: Grant
    facts: LegFacts | None = None  # of its leg; None for a probe, and for a refused grant
    is_computed_here: bool = False  # its leg ends at once, and the other engine is informed
    is_refused: bool = False  # the grant was not valid; the request's answer reports that
    has_waiting_receivers: bool = False  # D may wait for the transfer of a refused grant


class Admission:
    """Reads the grants of one engine's requests."""

    def __init__(
        self, key: FleetKey, *, has_states: bool, leaves_out_last: bool, loopback_only: bool
    ) -> None:
        """Creates the admission of an engine whose workers are not known yet.

        `has_states`: the model has SSM states. `leaves_out_last`: the last token of a prompt is
        not transferred. `loopback_only`: the engine dials no other machine.
        """
        self._key = key
        self.computes_seeded = False  # whether requests with a seed have no transfer
        self._has_states = has_states
        self._leaves_out_last = leaves_out_last
        self._loopback_only = loopback_only
        self._used = UsedGrants(has_key=key.is_set)
        self._checker: GrantChecker | None = None

    def set_engine(self, engine: EngineInfo) -> None:
        """Accepts grants for this engine from now on; used ones stay used."""
        self._checker = GrantChecker(engine, self._used, loopback_only=self._loopback_only)

    @property
    def engine(self) -> EngineInfo | None:
        """The description of the engine; None before `set_engine`."""
        return self._checker.engine if self._checker is not None else None

    def admit(self, request: Request, now: float, *, before_lookup: bool) -> AdmittedRequest | None:
        """Returns the request with its grant, which is used up; None without a grant.

        `now`: by the engine's clock. `before_lookup`: vLLM has not looked the prompt up in its
        prefix cache yet.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict) or REQUEST_KEY not in params:
            return None
        try:
            grant = verify(self._key, params[REQUEST_KEY])
        except BadGrant as error:
            _log_refusal(request, error)
            # Refused and logged once, not at each of vLLM's calls. The reason is for the answer.
            request.kv_transfer_params = {REFUSED_KEY: str(error)}
            return None
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
            _log_refusal(request, error)
            return AdmittedRequest(
                grant, is_refused=True, has_waiting_receivers=has_waiting_receivers
            )
        return self._admit_leg(request, grant, checker, now, before_lookup=before_lookup)

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

    def _admit_leg(
        self,
        request: Request,
        grant: Grant,
        checker: GrantChecker,
        now: float,
        *,
        before_lookup: bool,
    ) -> AdmittedRequest:
        """Returns a leg's request with its facts."""
        digest = prompt_digest.digest_prompt(request)
        generates_one = compat.generates_one(request)
        # When P's request ends, vLLM frees blocks that no token after the prompt looks back to. D
        # computes the prompt's last token again, which looks back one token further. That token
        # may be in one block more, so P leaves out the last token of the prompt too.
        leaves_out_last = self._has_states or (before_lookup and self._leaves_out_last)
        is_left_out = (
            bool(digest)
            and grant.leg == "prefill"
            and request.num_prompt_tokens > 1
            and leaves_out_last
            and generates_one
        )
        if is_left_out:
            compat.leave_out_last(request)
        obstacle = ""
        if not digest:
            obstacle = "the inputs of its prompt cannot be compared between engines"
        elif grant.leg == "prefill" and self._leaves_out_last and not generates_one:
            # vLLM would cache a second token under the hash of the token that was left out.
            obstacle = "with sliding windows or SSM states a prefill leg must have max_tokens 1"
        elif self.computes_seeded and compat.is_seeded(request):
            # vLLM takes more random numbers in the step that follows loaded KV. A plain vLLM, too,
            # gives a prompt of its cache other tokens then.
            obstacle = "with speculative decoding a seed has an effect only if nothing is loaded"
        if obstacle:
            log.warning(
                "request %s: %s; this engine computes it without a KV transfer",
                request.request_id,
                obstacle,
            )
        else:
            # The one line by which each leg is found, also in the log of an engine that dies.
            log.info(
                "request %s: %s leg of transfer %s admitted",
                request.request_id,
                grant.leg,
                grant.transfer,
            )
        # Of a vLLM without the hook before the lookup, P computes a token that D does not read.
        writes_more = not generates_one or (self._leaves_out_last and not is_left_out)
        facts = _leg_facts(request, grant, checker, now, digest, writes_more=writes_more)
        return AdmittedRequest(grant, facts, is_computed_here=bool(obstacle))


def _leg_facts(
    request: Request,
    grant: Grant,
    checker: GrantChecker,
    now: float,
    digest: str,
    *,
    writes_more: bool,
) -> LegFacts:
    """Returns the facts of a new leg; uses up the transfer id of its reuse."""
    plan = (
        checker.plan_reads(grant.sources) if grant.leg == "decode" else _reuse_plan(grant, checker)
    )
    reuse = checker.use_reuse(grant, now) if plan is not None else None
    return LegFacts(
        request=request.request_id,
        transfer=grant.transfer,
        prompt_tokens=request.num_prompt_tokens,
        digest=digest,
        sources=grant.sources,
        plan=plan,
        stall_timeout=grant.patience,
        writes_more=writes_more,
        reuse=reuse,
    )


def _reuse_plan(grant: Grant, checker: GrantChecker) -> ReshardPlan | None:
    """Returns the plan by which a prefill leg reads from D; None if it runs without reuse."""
    if not grant.back:
        return None
    try:
        return checker.plan_reuse(grant)
    except (BadGrant, Unmappable) as error:
        log.warning(
            "transfer %s: KV cached at D is not reused (%s); P computes the whole prompt",
            grant.transfer,
            error,
        )
        return None


def _log_refusal(request: Request, error: BadGrant) -> None:
    log.warning(
        "request %s: grant refused (%s); this engine computes it without a KV transfer",
        request.request_id,
        error,
    )
