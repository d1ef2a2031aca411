"""A router of the standard handshake: P's leg, then D's leg with the parameters of P's answer.

With mischief it does what routers and hostile clients do: it loses parameters, changes them, sends
old ones, sends them with another prompt, and to two engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulated_engine import SimulatedEngine
from symbols import OTHER_TOKEN

from vllm_disagg.fleet import handovers

if TYPE_CHECKING:
    from scheduler_world import SchedulerWorld

Params = dict[str, Any]
PREFILL_PARAMS: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class RoutedRequest:
    """A request whose prefill leg was sent."""

    number: int
    prompt: list[int]
    answer: int  # tokens
    priority: int
    decode: SimulatedEngine
    adapter: int = 0


class StandardRouter:
    """Sends the legs of requests, one after the other."""

    def __init__(self, world: SchedulerWorld) -> None:
        """Creates the router of a world."""
        self._world = world
        self._open: dict[str, RoutedRequest] = {}  # by the name of the prefill leg
        self._seen: list[Params] = []  # of earlier answers

    def send(self, prefill: SimulatedEngine, request: RoutedRequest, answer: int) -> None:
        """Sends a request's prefill leg. `answer`: the tokens that P generates."""
        name = f"prefill{request.number}"
        self._open[name] = request
        prefill.add(
            name, request.prompt, answer, request.priority, dict(PREFILL_PARAMS), request.adapter
        )

    def take_answer(self, name: str, params: Params | None) -> list[Callable[[], None]]:
        """Takes the answer of a prefill leg; returns the legs that follow from it."""
        request = self._open.pop(str(name), None)  # str: vLLM's ids have another hash here
        if request is None:
            return []
        outcome = "handovers" if params is not None else "prompts without a handover"
        self._world.counts[outcome] += 1
        mischief = self._world.happens_badly
        if params is not None:
            assert handovers.is_decode_leg(params), params
        if params is not None and mischief():
            params = self._spoil(params)
        prompt = list(request.prompt)
        if mischief():
            prompt[self._world.random.randrange(len(prompt))] = OTHER_TOKEN
        request = replace(request, adapter=self._world.draw_adapter_at_d(request.adapter))
        legs = [self._leg("decode", request, request.decode, prompt, params)]
        if mischief():
            second = self._world.random.choice(self._world.engines)
            legs.append(self._leg("again", request, second, prompt, params))
        return legs

    def _leg(
        self,
        name: str,
        request: RoutedRequest,
        engine: SimulatedEngine,
        prompt: list[int],
        params: Params | None,
    ) -> Callable[[], None]:
        label = f"{name}{request.number}"
        return lambda: engine.add(
            label, prompt, request.answer, request.priority, params, request.adapter
        )

    def _spoil(self, params: Params) -> Params | None:
        """Returns parameters that another router, or a client, has made of these."""
        random = self._world.random
        self._seen.append(params)
        token = str(params[handovers.TOKEN_KEY])
        cut = random.randrange(len(token))
        return random.choice(
            [
                None,
                random.choice(self._seen),
                {**params, handovers.TOKEN_KEY: token[:cut] + "A" + token[cut + 1 :]},
                {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "x"},
                {**params, "do_remote_decode": True},
            ]
        )
