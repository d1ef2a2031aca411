"""Answers through the proxy equal plain vLLM's: all lengths, streamed or not, alone or many."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from asking import Body, Record, ask, at_once, body, english, expect_same, tokens
from conftest import Main
from engines import BLOCK, CHUNK, ELEMENT_BYTES, KIND, LIMIT, RUNNER, wait

LENGTHS = [
    1,
    2,
    64,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    383,
    384,
    385,
    511,
    512,
    513,
]
LONG = [640, 767, 768, 769, 1000, 1024, 1025, 1500, 1792, LIMIT - 25]
HEAD_SIZE = 128 if KIND == "wide" else 32
# Of a block in one layer: keys and values, two heads.
LAYER_BYTES = 2 * 2 * HEAD_SIZE * ELEMENT_BYTES * BLOCK
BLOCK_BYTES = 4 * LAYER_BYTES


def needed(lengths: Iterable[int]) -> int:
    """Returns the bytes to transfer for prompts without any cached prefix."""
    return sum(-(-length // BLOCK) for length in lengths) * BLOCK_BYTES


class Transfers:
    """Asserts that exactly so many bytes of KV arrive while this context is open."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self.decode = main.decode
        self.expected = 0

    def __enter__(self) -> Transfers:
        self.before = self.decode.received
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            target = self.before + self.expected
            try:
                wait(f"{self.expected} bytes arrive", lambda: self.decode.received >= target)
            except AssertionError as late:
                raise AssertionError(f"{late}; {self.main.exceptional_counts()}") from None
            assert self.decode.received == target


def check_at_once(main: Main, asked: list[Body]) -> list[Record]:
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    ours = at_once(lambda one: ask(main.proxy.url, one), asked)
    for one, expected, what in zip(ours, plain, asked, strict=True):
        expect_same(one, expected, f"{what['prompt']!r:.60}")
    return ours


@pytest.mark.parametrize("length", LENGTHS + LONG)
def test_token_prompts(main: Main, length: int) -> None:
    with Transfers(main) as transfers:
        assert (
            main.check(body(tokens(length, f"length {length}"), 16, logprobs=5)).prompt_tokens
            == length
        )
        check_at_once(main, [body(tokens(length, f"length {length} {at}"), 16) for at in range(3)])
        transfers.expected = needed([length] * 4)


@pytest.mark.parametrize("characters", [1, 40, 300, 700, 1500, 3000, 5000])
def test_english_prompts(main: Main, characters: int) -> None:
    with Transfers(main) as transfers:
        answers = check_at_once(
            main, [body(english(characters, f"{characters} {at}")) for at in range(4)]
        )
        transfers.expected = needed(answer.prompt_tokens for answer in answers)


@pytest.mark.parametrize(
    "prompt", [1, BLOCK, CHUNK + 1, 1000, LIMIT - BLOCK - 1, LIMIT - 2, LIMIT - 1]
)
def test_up_to_the_models_limit(main: Main, prompt: int) -> None:
    rest = LIMIT - prompt if prompt > 1000 else 300
    ours = main.check(body(tokens(prompt, f"limit {prompt}"), rest, ignore_eos=True))
    assert ours.usage[1] == rest


def test_a_request_without_max_tokens_ends_where_plain_vllm_ends(main: Main) -> None:
    asked = body(tokens(LIMIT - 60, "open end"), ignore_eos=True)
    main.check({**asked, "max_tokens": None})
    main.check(
        {name: value for name, value in asked.items() if name != "max_tokens"}
    )  # vLLM's default: 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [(LIMIT, 1), (LIMIT + 1, 1), (3 * LIMIT, 16), (LIMIT - 10, 5 * LIMIT)]
)
def test_too_long_is_refused_as_by_plain_vllm(
    main: Main, prompt: int, max_tokens: int, stream: bool
) -> None:
    assert main.check(body(tokens(prompt, "too long"), max_tokens, stream=stream)).status == 400


def test_answers_that_would_pass_the_limit_end_as_plain_vllms(main: Main) -> None:
    main.check(
        body(tokens(LIMIT - 10, "nearly too long"), 11, ignore_eos=True)
    )  # vLLM 0.32 shortens the answer


# Sampling and stopping ----------------------------------------------------------------------------
@pytest.mark.parametrize("length", [30, BLOCK, 300, 700])
def test_stop_strings(main: Main, length: int) -> None:
    asked = body(tokens(length, f"stop {length}"), 48, ignore_eos=True)
    text = ask(main.plain.url, asked).texts[0]
    for stop in ([text[9:12]], [text[30:34], text[20:23]], ["never to be seen"]):
        for more in ({}, {"include_stop_str_in_output": True}):
            ours = main.check({**asked, "stop": stop, **more})
            assert ours.finishes == (("stop",) if stop[0] in text else ("length",))


def test_stop_tokens_and_lower_bounds(main: Main) -> None:
    asked = body(tokens(300, "stop tokens"), 32, ignore_eos=True)
    seen = ask(main.plain.url, asked).tokens[0]
    assert main.check({**asked, "stop_token_ids": [seen[3]]}).usage[1] <= 4
    assert (
        main.check({**asked, "stop_token_ids": [seen[0]]}).usage[1] == 1
    )  # the very first token, which P made too
    assert main.check({**asked, "stop_token_ids": [seen[0]], "min_tokens": 8}).usage[1] >= 8


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK + 1, CHUNK])
def test_seeds(main: Main, length: int) -> None:
    """Not beyond one chunk: on CPUs vLLM 0.32 dies of a seeded prompt in several chunks.

    Its error is "CPU Generator does not use offset". Triton's interpreter cannot run vLLM's kernel
    for top-p: `tl.range` gives it numbers without `to`.
    """
    top_p = 1.0 if RUNNER.is_interpreted else 0.9
    prompt = tokens(length, f"seed {length}")
    seen = {
        main.check(body(prompt, 24, temperature=0.8, seed=seed, top_p=top_p)).tokens
        for seed in range(4)
    }
    assert len(seen) > 1, "every seed gave the same answer: sampling was not tested"


def test_penalties_and_biases(main: Main) -> None:
    prompt = tokens(300, "penalties")
    for more in (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"7": 40}},
    ):
        main.check(body(prompt, 24, **more))


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_logprobs(main: Main, logprobs: int) -> None:
    for length in (1, BLOCK, 500):
        assert main.check(
            body(tokens(length, f"logprobs {length}"), 24, logprobs=logprobs)
        ).logprobs


# Many at once -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["distinct", "one prefix", "all equal"])
def test_32_at_once(main: Main, kind: str) -> None:
    started = f"{kind} {time.time()}"
    common = tokens(3 * BLOCK, started)
    prompts = {
        "distinct": [tokens(1 + 37 * at, f"{started} {at}") for at in range(32)],
        "one prefix": [common + tokens(1 + 13 * at, f"{started} {at}") for at in range(32)],
        "all equal": [common + tokens(70, started)] * 32,
    }[kind]
    asked = [body(prompt, 24) for prompt in prompts]
    before = main.decode.received
    check_at_once(main, asked)
    wait("KV arrives", lambda: main.decode.received > before)
    if kind == "distinct":
        assert main.decode.received - before == needed(len(prompt) for prompt in prompts)


def test_requests_with_one_id(main: Main) -> None:
    """A client's id names its request in logs only: answers and transfers are kept apart."""
    before = main.decode.received
    asked = [body(tokens(300 + 40 * at, f"one id {at}"), 24, request_id="same") for at in range(8)]
    at_once(main.check, asked)
    wait("KV is transferred", lambda: main.decode.received > before)


@pytest.mark.skipif(not RUNNER.transport, reason="ENGINE_RUNNER chooses no transport")
def test_kv_goes_by_the_transport_of_the_runner(main: Main) -> None:
    """After its proof: until then KV goes by ZMQ."""
    name, label = "vllm:disagg_received_wire_bytes_total", f'transport="{RUNNER.transport}"'
    before = main.decode.metric(name, label)
    with Transfers(main) as transfers:
        main.check(body(tokens(1000, "by the runner's transport")))
        transfers.expected = needed([1000])
    assert main.decode.metric(name, label) - before >= transfers.expected
