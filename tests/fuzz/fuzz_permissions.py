"""`kv_transfer_params` at the real scheduler side: of strangers, of routers, and with the key.

Whatever a client writes, the engine gets an ordinary request or a transfer that ends. With the
key, contents are authentic and wrong: then a grant is refused, or its transfer ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from fuzz_campaign import Clock, Leak, Unit
from fuzz_values import json_value, mutated, random_bytes, values_of

from kv_connectors import prompt_digest, scheduler
from kv_connectors.metadata import Handshake
from kv_connectors.scheduler import SchedulerSide
from vllm_disagg.fleet import grants, handovers, sealing
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import events, messages
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.receiver import Receiver

KEY = FleetKey(b"k" * KEY_BYTES)
BLOCK = 16
LENGTH = 40
HOLDS = uniform(layers=2, block_size=BLOCK, block_bytes=[64])
OWN = WorkerInfo("me/0", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4", holds=HOLDS)
NEAR = WorkerInfo("p/0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", holds=HOLDS)
LAYOUT = {"dtype": "bf16"}
GROUPS: Any = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
STATUSES = ("FINISHED_ABORTED", "FINISHED_LENGTH_CAPPED")
SOURCES_AT_MOST = 3


class PermissionTarget:
    """Requests with any parameters, from their arrival to their end."""

    unit: Unit = "bodies"
    batch = 500

    def __init__(self, random: Random) -> None:
        self._clock = Clock()
        self._patched = mock.patch.object(scheduler, "time", self._clock)
        self._patched.start()
        self._receiver = Receiver(OWN.name, "zmq:1", 0, HOLDS)
        role = random.choice(("prefill", "decode", "both"))
        self._side = SchedulerSide(KEY, role, LAYOUT, GROUPS)
        self._side.set_workers([Handshake(OWN, ["a", "b"])])
        self._grant = values_of(grants.Grant)
        self._handover = values_of(handovers.Handover)
        self._worker = values_of(WorkerInfo)
        self._layout = values_of(type(HOLDS))
        self._serial = 0
        self._tokens: list[str] = []

    def close(self) -> None:
        """Gives the module its clock back."""
        self._patched.stop()

    def feed(self, random: Random) -> None:
        """Runs one request from its arrival to its end."""
        self._serial += 1
        self._clock.now += 0.01
        name = f"r{self._serial}"
        request = self._request(name, self._params(random), random)
        side = self._side
        if random.random() < 0.5:
            side.on_request_arrived(request)
        tokens = side.tokens_to_load(request, random.choice((0, BLOCK))) or 0
        if not 0 <= tokens <= LENGTH:
            raise AssertionError(f"{tokens} tokens to load of a prompt of {LENGTH}")
        if random.random() < 0.9:
            side.on_blocks_allocated(request, [[3, 4, 5]], tokens)
        self._step(random)
        is_loading = side._legs.is_loading(name)
        keeps_blocks, answer = side.on_request_finished(request)
        msgspec.msgpack.encode(answer)
        if keeps_blocks:
            side.on_released([name])
        if is_loading:
            side.on_load_finished(name)
        self._step(random)

    def _step(self, random: Random) -> None:
        """Hands the step's events to a worker, to which the sources then send any progress."""
        receiver = self._receiver
        for fact in self._side.build_step_metadata(_empty_step()).receiver_events:
            self._handle(fact)
            if not isinstance(fact, events.LoadRequested):
                continue
            for source in fact.sources:
                first, second, third = random.choices((0, 1, BLOCK, LENGTH, 2**31), k=3)
                names = (fact.transfer, source.name, receiver.name)
                self._handle(messages.Progress(*names, first, second, third))
            self._handle(events.LoadCancelled(fact.transfer))
        receiver.validate()

    def _handle(self, event: Any) -> None:
        for action in self._receiver.handle(event, self._clock.now):
            if isinstance(action, events.CancelReads):
                for number in action.numbers:
                    ended = events.ReadCompleted(
                        action.transfer, number, events.ReadStatus.CANCELLED
                    )
                    self._handle(ended)

    def _request(self, name: str, params: Any, random: Random) -> Any:
        return SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            num_prompt_tokens=LENGTH,
            prompt_token_ids=[0] * LENGTH,
            status=SimpleNamespace(name=random.choice(STATUSES)),
            prompt_embeds=None,
            arrival_time=0.0,
            mm_features=[],
            lora_request=None,
            sampling_params=SimpleNamespace(n=1),
            max_tokens=random.choice((1, 16)),
        )

    def _params(self, random: Random) -> Any:
        how = random.random()
        if how < 0.2:
            names = (
                grants.REQUEST_KEY,
                handovers.TOKEN_KEY,
                "do_remote_decode",
                "do_remote_prefill",
            )
            return {name: json_value(random) for name in random.choices(names, k=2)}
        if how < 0.25:
            return json_value(random)
        if how < 0.65:
            use, content = grants.USE, self._grant_content(random)
            params: dict[str, Any] = {}
            key = grants.REQUEST_KEY
        else:
            use, content = handovers.USE, self._handover_content(random)
            params = {handovers.DECODE_FLAG: True}
            key = handovers.TOKEN_KEY
        payload = msgspec.msgpack.encode(content)
        if random.random() < 0.15:
            payload = mutated(random, payload)
        token = sealing.seal(KEY, use, payload)
        self._tokens = [*self._tokens[-20:], token]
        if random.random() < 0.1:
            token = random.choice(self._tokens)
        if random.random() < 0.1:
            token = mutated(random, token.encode()).decode("latin-1")
        if random.random() < 0.02:
            token = random_bytes(random, 200).hex()
        return {**params, key: token}

    def _sources(self, random: Random) -> list[WorkerInfo]:
        made = []
        for number in range(random.randrange(SOURCES_AT_MOST)):
            worker = NEAR
            if random.random() < 0.3:
                worker = self._worker(random)
            if random.random() < 0.5:
                worker = msgspec.structs.replace(worker, holds=self._layout(random))
            if random.random() < 0.8:
                worker = msgspec.structs.replace(worker, name=f"p/{number}", control=NEAR.control)
            made.append(worker)
        return made or [NEAR]

    def _grant_content(self, random: Random) -> Any:
        grant = self._grant(random)
        engine = self._side.engine
        assert engine is not None
        changes: dict[str, Any] = {"sources": self._sources(random)}
        if random.random() < 0.9:
            changes["engine"] = engine.incarnation
            changes["until"] = self._side.clock + random.choice((60.0, 0.0, 1e9))
            changes["patience"] = random.choice((1e-9, 60.0, 86400.0))
        if random.random() < 0.8:
            changes["back"] = None
        return msgspec.structs.replace(grant, **changes)

    def _handover_content(self, random: Random) -> Any:
        handover = self._handover(random)
        prompt = prompt_digest.digest_prompt(self._request("x", None, random))
        changes: dict[str, Any] = {"sources": self._sources(random)}
        if random.random() < 0.9:
            changes["prompt"] = prompt
            changes["layout"] = LAYOUT
        return msgspec.structs.replace(handover, **changes)

    def finish(self) -> None:
        """Checks that no request and no load is left."""
        side = self._side
        left: dict[str, Mapping[str, object]] = {
            "admitted requests": side._admitted,
            "legs": side._legs.legs,
            "aborted loads": side._aborted_loads,
            "transfers of the worker": self._receiver.transfers,
            "lookups of the worker": self._receiver.lookups.open,
        }
        for what, entries in left.items():
            if entries:
                raise Leak(f"{what}: {len(entries)}, as {next(iter(entries))!r}")


def _empty_step() -> Any:
    return SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
    )
