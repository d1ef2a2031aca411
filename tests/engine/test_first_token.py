"""Streams that begin with the prefill engine's token, beside those of plain vLLM."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from asking import TIMEOUT_SECONDS, at_once, body, english, expect_same, record, tokens
from conftest import Main
from engines import ADMIN, BLOCK, PAGE_SECONDS, Proxy, get

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
IDENTITY = re.compile(r'"id":"[^"]*"|"created":\d+')
TOGETHER = 4
Body = dict[str, Any]


@dataclass(frozen=True)
class Streamed:
    """A stream: what was said, and the form of its first event with text."""

    answer: Body  # as an answer that is no stream
    first_text: str
    first_finish: str | None  # of the event with that text
    form: str  # of the events up to the first text, without identity and text
    events: int


def streamed(url: str, job: tuple[str, Body]) -> Streamed:
    path, asked = job
    server = http.client.HTTPConnection(url.removeprefix("http://"), timeout=TIMEOUT_SECONDS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        content = {"content-type": "application/json"}
        server.request("POST", path, json.dumps({**asked, **options}), content)
        reply = server.getresponse()
        raw = reply.read().decode()
        assert reply.status == 200, raw
    finally:
        server.close()
    *events, done, end = raw.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), raw[-500:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    texts = [text_of(chunk) for chunk in chunks]
    first = next((place for place, text in enumerate(texts) if text), 0)
    finishes = [finish_of(chunk) for chunk in chunks]
    *_, finish = [one for one in finishes if one]
    choice = {"index": 0, "text": "".join(texts), "finish_reason": finish}
    # An event of half a character is empty, or part of the next one, as it happens.
    shown = [e for e, text in zip(events, texts, strict=True) if text or '"role"' in e]
    leading = 2 if '"role"' in raw.partition("\n")[0] else 1
    head = IDENTITY.sub("", "\n".join(shown[:leading]))
    spelled = json.dumps(texts[first], ensure_ascii=False)
    answer = {"choices": [choice], "usage": chunks[-1]["usage"]}
    form = head.replace(spelled, "TEXT")
    return Streamed(answer, texts[first], finishes[first], form, len(chunks))


def text_of(chunk: Body) -> str:
    if not chunk["choices"]:
        return ""
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def finish_of(chunk: Body) -> str | None:
    return chunk["choices"][0]["finish_reason"] if chunk["choices"] else None


def completion(prompt: object, max_tokens: int = 8, **more: Any) -> tuple[str, Body]:
    asked = body(prompt, max_tokens, **more)
    del asked["return_token_ids"]
    return COMPLETIONS, asked


def chat(characters: int, seed: object, **more: Any) -> tuple[str, Body]:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": english(characters, f"first token {seed}")},
    ]
    return CHATS, body(messages, 8, **more)


JOBS: dict[str, list[tuple[str, Body]]] = {
    "lengths": [
        completion(tokens(length, f"first {length} {turn}"), 2 + turn)
        for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 257, 600, 1500)
        for turn in range(5)
    ],
    "texts": [completion(english(900, f"first text {seed}"), 12) for seed in range(24)],
    "chats": [chat(400 + 40 * seed, seed) for seed in range(32)],
    "fields": [
        completion(english(700, f"first field {at}{fields}"), **fields)
        for at in range(4)
        for fields in (
            {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
            {"logit_bias": {"65": 4.0, "300": 3.5}, "top_p": 0.5, "seed": 3},
            {"allowed_token_ids": list(range(60, 400))},
            {"bad_words": ["a", " the", "e"], "ignore_eos": True},
            {"stop_token_ids": list(range(50, 1000, 3)), "skip_special_tokens": False},
        )
    ],
}


@pytest.fixture(scope="module")
def proxy(main: Main) -> Iterator[Proxy]:
    with main.other_proxy("proxy9", "--first-token", "prefill") as made:
        yield made


def count(proxy: Proxy, outcome: str) -> int:
    page = get(proxy.url, "/metrics", PAGE_SECONDS, ADMIN)[1]
    found = re.findall(
        rf'^vllm_disagg_first_tokens_total{{outcome="{outcome}"}} (\S+)$', page, re.MULTILINE
    )
    return int(sum(map(float, found)))


@pytest.mark.parametrize("kind", JOBS)
def test_streams_equal_those_of_plain_vllm(main: Main, proxy: Proxy, kind: str) -> None:
    jobs = JOBS[kind]
    before = count(proxy, "sent")
    alike = 0
    for place in range(0, len(jobs), TOGETHER):
        some = jobs[place : place + TOGETHER]
        plain = at_once(lambda job: streamed(main.plain.url, job), some)
        ours = at_once(lambda job: streamed(proxy.url, job), some)
        for job, right, found in zip(some, plain, ours, strict=True):
            expect_same(record(200, found.answer), record(200, right.answer), f"{job!r:.300}")
            # Tokens that vLLM's API server reads late come in one event, in plain vLLM too. A last
            # one without text shows by its finish reason only.
            first = (found.first_text, found.first_finish)
            if first == (right.first_text, right.first_finish):
                assert found.form == right.form
                alike += found.events == right.events
    sent = count(proxy, "sent") - before
    print(f"{kind}: {len(jobs)} streams, {sent} began with P's token, {alike} cut alike")
    assert count(proxy, "different") == 0
    assert sent >= len(jobs) // 3
