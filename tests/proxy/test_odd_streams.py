"""Streams that are not made as vLLM makes them: whatever they look like, a second answer is never appended to a first."""

import asyncio
import json
from collections.abc import Callable

import pytest

from proxy_world import Call, answer, world
from vllm_disagg.proxy.dialects import DIALECTS

SAID = ("START", "MIDDLE", "END")


def chunk(said: str) -> str:
    return json.dumps({"id": "c-1", "object": "text_completion", "created": 7, "choices": [{"index": 0, "text": said}]})


def named(kind: str) -> Callable[[str], str]:
    return lambda said: f'event: {kind}\ndata: {{"type":"{kind}","delta":"{said}"}}\n\n'


FRAMINGS: dict[str, Callable[[str], str]] = {
    "as vLLM's": lambda said: f"data: {chunk(said)}\n\n",
    "no space": lambda said: f"data:{chunk(said)}\n\n",
    "two spaces": lambda said: f"data:  {chunk(said)}\n\n",
    "named": lambda said: f"event: message\ndata: {chunk(said)}\n\n",
    "numbered": lambda said: f"id: 1\ndata: {chunk(said)}\n\n",
    "name last": lambda said: f"data: {chunk(said)}\nevent: message\n\n",
    "comment within": lambda said: f": x\ndata: {chunk(said)}\n\n",
    "two lines": lambda said: f"data: {chunk(said)[:-1]}\ndata: }}\n\n",
    "CRLF": lambda said: f"data: {chunk(said)}\r\n\r\n",
    "CR": lambda said: f"data: {chunk(said)}\r\r",
    "blank lines": lambda said: f"\n\ndata: {chunk(said)}\n\n",
    "byte order mark": lambda said: f"\ufeffdata: {chunk(said)}\n\n",
    "text": lambda said: f"data: {said}\n\n",
    "a JSON text": lambda said: f'data: "{said}"\n\n',
    "no choices": lambda said: f'data: {{"said":"{said}"}}\n\n',
    "after [DONE]": lambda said: f"data: [DONE]\n\ndata: {chunk(said)}\n\n",
    "of another endpoint": named("response.output_text.delta"),
    "of an unknown kind": named("novelty"),
    "the name differs": lambda said: f'event: message_stop\ndata: {{"type":"ping","said":"{said}"}}\n\n',
    "no blank line": lambda said: f"data: {chunk(said)}\n",
}


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_second_answer_is_never_appended(framing: str, path: str) -> None:
    made = [FRAMINGS[framing](said).encode() for said in SAID]
    asked: list[Call] = []

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
            return
        asked.append(call)
        first = len(asked) == 1
        await call.stream()
        for event in made[: 2 if first else 3]:
            await call.chunk(event)
            await asyncio.sleep(0.002)
        if first:
            call.reset()
        else:
            await call.end()

    async with world(decode=2) as w:
        for engine in w.prefills + w.decodes:
            engine.script = script
        prompt = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "token_ids": [1]}
        body = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 9, "sampling_params": {"temperature": 0}}
        reply = await w.post(path, json.dumps({**prompt, **body}).encode())
    said = [reply.body.count(word.encode()) for word in SAID]
    assert reply.status == 200 and reply.complete and max(said) <= 1, reply.body
    assert (b'"error"' in reply.body) == (said != [1, 1, 1]), reply.body
