"""The rest of the API, as clients use it: streams, chats, several prompts and answers, errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from asking import (
    TIMEOUT_SECONDS,
    Record,
    ask,
    body,
    english,
    expect_same,
    tokens,
    until_the_end,
)
from conftest import Main
from engines import BLOCK, wait

CHAT = "/v1/chat/completions"


def client(url: str) -> openai.OpenAI:
    base = f"{url}/v1"
    made = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)
    return until_the_end(made)


def streamed(chunks: Any) -> Record:
    """Returns a stream as one answer, with the usage that came at its end."""
    texts: dict[int, str] = {}
    finishes: dict[int, list[str]] = {}
    usages = []
    for chunk in chunks:
        if chunk.usage:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                finishes.setdefault(choice.index, []).append(choice.finish_reason)
    (usage,) = usages
    assert all(len(said) == 1 for said in finishes.values()), finishes
    return Record(
        200,
        tuple(texts[at] for at in sorted(texts)),
        finishes=tuple(finishes[at][0] for at in sorted(finishes)),
        usage=(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    )


def stream(url: str, prompt: Any, max_tokens: int, **more: Any) -> Record:
    options: Any = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        **more,
    }
    create: Any = client(url).chat.completions.create
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return streamed(create(model="tiny", messages=prompt, max_tokens=max_tokens, **options))
    create = client(url).completions.create
    return streamed(create(model="tiny", prompt=prompt, max_tokens=max_tokens, **options))


def conversation(characters: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": english(characters, f"chat {characters}")},
        {"role": "assistant", "content": "Certainly."},
        {"role": "user", "content": "And then?"},
    ]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 257, 600, 1500])
def test_streams(main: Main, length: int) -> None:
    for max_tokens in (1, 2, 40):
        prompt = tokens(length, f"stream {length} {max_tokens}")
        plain = stream(main.plain.url, prompt, max_tokens)
        expect_same(stream(main.proxy.url, prompt, max_tokens), plain)
        whole = ask(main.plain.url, body(prompt, max_tokens))
        assert (plain.texts, plain.finishes, plain.usage) == (
            whole.texts,
            whole.finishes,
            whole.usage,
        )


def test_a_stream_with_stop_string(main: Main) -> None:
    prompt = tokens(400, "stream stop")
    text = stream(main.plain.url, prompt, 48).texts[0]
    for stop in (text[12:16], text[1:3]):
        plain = stream(main.plain.url, prompt, 48, stop=[stop])
        expect_same(stream(main.proxy.url, prompt, 48, stop=[stop]), plain)


@pytest.mark.parametrize("characters", [10, 400, 1500, 4000])
def test_chats(main: Main, characters: int) -> None:
    messages = conversation(characters)
    before = main.decode.received
    main.check(body(messages, 24, logprobs=True, top_logprobs=4, return_token_ids=True), CHAT)
    wait("KV arrives", lambda: main.decode.received > before)
    main.check(
        {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 24}, CHAT
    )
    if characters < 100:  # see test_seeds
        main.check(body(messages, 24, temperature=0.8, seed=7), CHAT)
    expect_same(stream(main.proxy.url, messages, 24), stream(main.plain.url, messages, 24))


def test_several_answers_and_prompts_are_served_whole(main: Main) -> None:
    """One grant is for one prompt and one answer: others run on the decode engine alone."""
    prompt, other, short = (
        tokens(250, "n"),
        tokens(200, "other"),
        tokens(60, "short"),
    )  # see test_seeds
    before = main.decode.received
    several = [
        body(short, 24, n=2, temperature=0.8, seed=3),
        body(short, 24, n=3, temperature=0.5, top_k=20, seed=4),
        body([prompt, other]),
        body([prompt]),
        body([english(300, 1), english(500, 2)]),
        body(prompt, 8, echo=True),
        body(english(300, 3), 8, echo=True, logprobs=1),
        body(prompt, 8, prompt_logprobs=1),
        body(prompt, 8, n=2, use_beam_search=True),
    ]
    for asked in several:
        assert main.check(asked).status == 200, asked
    for answers in (2, 3):
        main.check(body(conversation(10), 16, n=answers, temperature=0.8, seed=1), CHAT)
    two = {"n": 2, "temperature": 0.8, "seed": 1}
    expect_same(stream(main.proxy.url, short, 16, **two), stream(main.plain.url, short, 16, **two))
    assert main.decode.received == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [5000]},
        {"prompt": [-1]},
        {"model": "nobody"},
        {"max_tokens": -1},
        {"temperature": -2},
        {"logprobs": 1000},
        {"n": 0},
        {"stop": 7},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_mistakes_are_answered_as_by_plain_vllm(main: Main, wrong: dict[str, Any]) -> None:
    asked = {**body(tokens(200, "mistakes")), **wrong}
    assert 400 <= main.check(asked).status < 500


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_clients_cannot_steer_transfers(main: Main, name: str) -> None:
    for value in ({"disagg_grant": "x"}, {}, 1):
        assert ask(main.proxy.url, body(tokens(200, "steering"), **{name: value})).status == 400
    main.check(body(tokens(200, "steering"), **{name: None}))
    main.expect_well(1)
