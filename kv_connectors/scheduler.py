"""The scheduler's half of the connector: from vLLM's requests to events for the workers.

It opens no sockets and waits for nothing.  Only a verified grant makes a request more than an ordinary local one;
whatever else stands in `kv_transfer_params` is ignored.  Each request with a grant is one record, in one state.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_disagg import events, mapping
from vllm_disagg.errors import BadGrant, Unmappable
from vllm_disagg.grants import ANSWER_KEY, REQUEST_KEY, Engine, Grant, Worker, verify
from vllm_disagg.keys import FleetKey
from vllm_disagg.mapping import Plan

from . import compat, facts
from .messages import Handshake, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.scheduler")

# With nothing to do but to wait for KV, vLLM's engine looks for it in steps of about a millisecond, spinning in between
# on whatever core is free, perhaps the one that computes this very prefill.  A pause costs a load so much at the most.
PAUSE = 0.002  # seconds
USED = 65536  # transfer ids remembered, so that a grant works once
NULL = 0  # vLLM's block that holds nothing
PEERS = 256  # prefill engines whose plan is remembered
NORMAL_ENDS = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}


class State(Enum):
    NEW = auto()
    COMPUTING = auto()  # prefill leg: the workers know its blocks
    LOADING = auto()  # decode leg: the workers fetch
    LOCAL = auto()  # whatever it was, it is an ordinary request now


@dataclass
class Leg:
    grant: Grant
    length: int  # tokens of the prompt
    plan: Plan | None = None  # decode leg: who reads what
    state: State = State.NEW
    computed: int = 0  # tokens announced to the workers


def _blocks(ids: Sequence[int], size: int, token: int, end: int) -> events.Blocks:
    """Of one group: those that hold [token, end), without the ones before a window, for which vLLM puts its null block."""
    first, stop = token // size, -(-end // size)
    while first < stop - 1 and ids[first] == NULL:
        first += 1
    return events.Blocks(first * size, list(ids[first:stop]))


def _of_adapter(grant: Grant, request: Request) -> Grant:
    """With a LoRA adapter both sides go by a name of the transfer that only those who have the same adapter arrive at."""
    if (lora := request.lora_request) is None:
        return grant
    try:
        both = f"{grant.transfer} {facts.adapter(lora.lora_path)}"
    except OSError as error:
        raise BadGrant(f"the LoRA adapter {lora.lora_name} cannot be read: {error}") from None
    return msgspec.structs.replace(grant, transfer=hashlib.blake2b(both.encode(), digest_size=16).hexdigest())


class SchedulerSide:
    def __init__(self, key: FleetKey, role: str, layout: dict[str, str], groups: Sequence[KVCacheGroupSpec]) -> None:
        self._key = key
        self._role = role
        self._layout = layout
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        # vLLM computes the last token of a prompt that is loaded whole again.  With windows, it has not allocated the oldest
        # token that this one looks back to; a state is changed by it.  So the last one is left out of the load.
        specs = [one for g in groups for one in compat.specs_by_layer(g.kv_cache_spec).values() or [g.kv_cache_spec]]
        self._has_states = any(compat.is_state(spec) for spec in specs)
        self._last = int(self._has_states or any(compat.window(spec) for spec in specs))
        self._plans: dict[tuple[str, ...], Plan] = {}  # by the names of P's workers
        self._legs: dict[str, Leg] = {}  # by vLLM's request id
        self._used: dict[tuple[str, str], None] = {}
        self._next = StepMetadata()
        self.engine: Engine | None = None

    def set_workers(self, handshakes: Sequence[Handshake]) -> None:
        """All ranks in order: stages of the pipeline, in each the tensor parallel ranks, which hold the same layers."""
        names = "".join(handshake.worker.name for handshake in handshakes)
        numbers: dict[str, int] = {}  # of layers in the model
        forms: Counter[str] = Counter()
        workers = []
        for handshake in handshakes:
            holds = handshake.worker.holds
            for name, layer in zip(handshake.layers, holds.layers, strict=True):
                if name not in numbers:
                    kind = holds.kinds[layer]
                    forms[f"{kind.of} heads of {kind.form}"] += 1
                numbers.setdefault(name, len(numbers))
            holds = msgspec.structs.replace(holds, first=numbers[handshake.layers[0]] if handshake.layers else 0)
            workers.append(msgspec.structs.replace(handshake.worker, holds=holds))
        digest = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:12]
        self.engine = Engine(
            incarnation=hashlib.sha256(names.encode()).hexdigest()[:16],
            role=self._role,  # type: ignore[arg-type]
            workers=workers,
            layout={
                **self._layout,
                "layers": f"{len(numbers)} ({digest})",
                "KV of a token": "; ".join(f"{count} layers of {form}" for form, count in sorted(forms.items())),
            },
        )
        log.info("engine %s (%s) is ready for KV transfers", self.engine.incarnation, self._role)

    # A request comes -----------------------------------------------------------------------------------------
    def add(self, request: Request) -> Leg | None:
        """The record of a request with a grant that holds; None for every other request."""
        leg = self._legs.get(request.request_id)
        if leg is not None:
            return leg
        params = request.kv_transfer_params
        if not isinstance(params, dict) or REQUEST_KEY not in params:
            return None
        try:
            grant = _of_adapter(self._accept(verify(self._key, params[REQUEST_KEY]), request), request)
        except BadGrant as error:
            log.warning("request %s: grant refused (%s); it is served here alone", request.request_id, error)
            request.kv_transfer_params = None  # asked once, said once
            return None
        plan = self._plan(grant.sources) if grant.leg == "decode" else None
        if grant.leg == "prefill" and self._has_states and request.num_prompt_tokens > 1:
            compat.leave_out_last(request)
        leg = self._legs[request.request_id] = Leg(grant, request.num_prompt_tokens, plan)
        if grant.leg != "probe":
            self._next.requests[grant.transfer] = request.request_id
        return leg

    def _accept(self, grant: Grant, request: Request) -> Grant:
        if grant.leg == "probe":
            return grant
        if self.engine is None or grant.engine != self.engine.incarnation:
            raise BadGrant("for another engine, or for this one before its restart")
        if self._role not in (grant.leg, "both"):
            raise BadGrant(f"a {grant.leg} leg, but this engine's role is {self._role}")
        if request.prompt_token_ids is None:
            raise BadGrant("the prompt is not made of tokens")
        if grant.leg == "decode":
            if len({worker.name for worker in grant.sources}) < len(grant.sources):
                raise BadGrant("names one worker twice")
            try:
                self._plan(grant.sources)
            except Unmappable as error:
                raise BadGrant(f"P holds what cannot be read here: {error}") from None
        use = (grant.leg, grant.transfer)
        if use in self._used:
            raise BadGrant("used before")
        self._used[use] = None
        if len(self._used) > USED:
            del self._used[next(iter(self._used))]
        return grant

    def _plan(self, sources: Sequence[Worker]) -> Plan:
        """Who of us reads what of these workers; Unmappable if that cannot be."""
        assert self.engine is not None
        names = tuple(worker.name for worker in sources)
        if names not in self._plans:
            ours = [worker.holds for worker in self.engine.workers]
            self._plans[names] = mapping.plan([worker.holds for worker in sources], ours)
            if len(self._plans) > PEERS:
                del self._plans[next(iter(self._plans))]
        return self._plans[names]

    # The decode leg ------------------------------------------------------------------------------------------
    def tokens_to_load(self, request: Request, local: int) -> int:
        """How many tokens of the prompt, after `local` ones from our prefix cache, come from P."""
        leg = self.add(request)
        if leg is None or leg.grant.leg != "decode" or leg.state is not State.NEW:
            return 0
        missing = leg.length - self._last - local
        # With all whole blocks here, the rest is computed faster than it is fetched, and computed it must be partly.
        return 0 if missing <= 0 or (local and missing <= max(self._block_sizes)) else missing

    def allocated(self, request: Request, blocks: Sequence[list[int]], external: int) -> None:
        """`blocks`: by group, of the whole request."""
        leg = self._legs.get(request.request_id)
        if leg is None or leg.grant.leg != "decode" or leg.state is not State.NEW:
            return
        if external == 0:
            self._make_local(leg)
            return
        leg.state = State.LOADING
        end = leg.length - self._last
        wanted = [_blocks(ids, size, end - external, end) for size, ids in zip(self._block_sizes, blocks, strict=True)]
        assert leg.plan is not None  # a decode leg
        self._next.decode.append(
            events.Wanted(leg.grant.transfer, leg.grant.sources, leg.plan, wanted, end, leg.grant.patience)
        )

    def loaded(self, request_id: str) -> None:
        leg = self._legs.get(request_id)
        if leg is not None and leg.state is State.LOADING:
            leg.state = State.LOCAL

    def _make_local(self, leg: Leg) -> None:
        leg.state = State.LOCAL
        assert self.engine is not None  # or its grant had been refused
        nobody = mapping.nothing(len(leg.grant.sources), len(self.engine.workers))
        self._next.decode.append(events.Unneeded(leg.grant.transfer, leg.grant.sources, nobody))

    # The prefill leg -----------------------------------------------------------------------------------------
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
        if not output.num_scheduled_tokens and any(leg.state is State.LOADING for leg in self._legs.values()):
            time.sleep(PAUSE)
        return metadata

    def _scheduled(
        self, output: SchedulerOutput, request_id: str, computed: int, blocks: tuple[list[int], ...] | None
    ) -> None:
        leg = self._legs.get(request_id)
        if leg is None or leg.grant.leg != "prefill" or leg.state is State.LOCAL or leg.computed >= leg.length:
            return
        leg.state = State.COMPUTING
        leg.computed = min(leg.length, computed + output.num_scheduled_tokens[request_id])
        self._next.prefill.append(
            events.Scheduled(leg.grant.transfer, leg.computed, [list(ids) for ids in blocks or [()] * len(self._block_sizes)])
        )

    def _withdraw(self, leg: Leg | None) -> None:
        """The blocks of a prefill leg have been given up before D had them."""
        if leg is not None and leg.grant.leg == "prefill" and leg.state is not State.LOCAL:
            leg.state = State.LOCAL
            self._next.prefill.append(events.Withdrawn(leg.grant.transfer))

    # A request goes ------------------------------------------------------------------------------------------
    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether its blocks stay ours until the workers release them, what its answer says of this engine)."""
        self.add(request)  # a request that ends before it was scheduled
        leg = self._legs.pop(request.request_id, None)
        if leg is None:
            return False, None
        if leg.grant.leg == "decode":
            if leg.state is State.LOADING:
                self._next.decode.append(events.Cancelled(leg.grant.transfer))
            elif leg.state is State.NEW:
                self._make_local(leg)
            return False, None
        answer = {ANSWER_KEY: msgspec.to_builtins(self.engine)}
        if leg.grant.leg == "probe":
            return False, answer
        if leg.state is not State.COMPUTING or leg.computed < leg.length or request.status.name not in NORMAL_ENDS:
            self._withdraw(leg)
            return False, answer
        self._next.prefill.append(events.Pinned(leg.grant.transfer))
        return True, answer
