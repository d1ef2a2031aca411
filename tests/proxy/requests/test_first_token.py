"""Streams that begin with the prefill instance's token: at scripted engines, and in parts."""

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from proxy_world import Call, Client, Reply, Script, World, settle, until, world
from vllm_disagg.proxy.http.endpoint_schema import CHAT, COMPLETIONS, RESPONSES
from vllm_disagg.proxy.requests import first_token
from vllm_disagg.proxy.requests.bodies import parse
from vllm_disagg.proxy.requests.first_token import FirstToken, first_token_in, read_opening

COMPLETION = "/v1/completions"
CHATS = "/v1/chat/completions"
WORDS = ["The", " quick", ' "brown"', "\n\n", " fóx 🦊", "."]
ASKED = {"stream": True, "temperature": 0, "max_tokens": 9}
DONE = b"data: [DONE]\n\n"
ERROR = "its first token is not the one that the prefill instance made"


def event(call: Call, created: int, choice: dict[str, Any] | None, **more: Any) -> bytes:
    """Returns an event as vLLM 0.32 forms it."""
    chat = call.path == CHATS
    fields = {
        "id": f"{'chat' if chat else ''}cmpl-{call.headers['x-request-id']}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": created,
        "model": "m",
        "choices": [choice] if choice else [],
        **more,
    }
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def events(call: Call, words: list[str] = WORDS, created: int = 7) -> list[bytes]:
    """Returns D's whole stream."""
    chat = call.path == CHATS
    found = []
    if chat:
        delta = {"role": "assistant", "content": ""}
        role = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        found.append(event(call, created, role))
    for place, word in enumerate(words):
        text: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
        finish = "length" if place == len(words) - 1 else None
        nulls = {"logprobs": None, "finish_reason": finish, "token_ids": None}
        found.append(event(call, created, {"index": 0, **text, **nulls}))
    if call.body.get("stream_options"):
        usage = {"prompt_tokens": 2, "total_tokens": 2 + len(words), "completion_tokens": 6}
        found.append(event(call, created, None, usage=usage))
    return [*(raw + b"\n\n" for raw in found), DONE]


class Prefill:
    """P's script: one token. `text`: the token."""

    def __init__(self, text: str = "The") -> None:
        self.text = text
        self.finish = "length"
        self.answered = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, call: Call) -> None:
        await self.go.wait()
        text: dict[str, Any] = {"text": self.text}
        if call.path == CHATS:
            text = {"message": {"role": "assistant", "content": self.text}}
        whole = json.loads(event(call, 7, {"index": 0, **text, "finish_reason": self.finish})[6:])
        whole["kv_transfer_params"] = {"disagg_engine": call.engine.facts(call.rank)}
        await call.json(whole)
        self.answered.set()


class Decode:
    """D's script: accepts at once, and streams when P has answered and `go` is set."""

    def __init__(self, prefill: Prefill) -> None:
        self.prefill = prefill
        self.accept = asyncio.Event()
        self.go = asyncio.Event()
        self.accept.set()
        self.go.set()
        self.words = WORDS
        self.created = 7
        self.pause_after = 0  # events that it sends before P has answered
        self.last_call: Call
        self.instead: Script | None = None

    async def __call__(self, call: Call) -> None:
        self.last_call = call
        await self.accept.wait()
        if self.instead:
            await self.instead(call)
            return
        await call.stream()
        for place, raw in enumerate(events(call, self.words, self.created)):
            if call.grant and place == self.pause_after:
                await self.prefill.answered.wait()
                await settle()  # P's answer reaches the proxy first
                await self.go.wait()
            await call.chunk(raw)
        await call.end()

    @property
    def said(self) -> bytes:
        """The bytes of its last stream."""
        return b"".join(events(self.last_call, self.words, self.created))


class Pair:
    """Scripts at the engines of a world, and a client of it."""

    def __init__(self, it: World, path: str = COMPLETION) -> None:
        self.world = it
        self.path = path
        self.prefill = Prefill()
        self.decode = Decode(self.prefill)
        for engine in it.prefills:
            engine.script = self.prefill
        for engine in it.decodes:
            engine.script = self.decode

    def body(self, **fields: Any) -> bytes:
        prompt = {"messages": [{"role": "user", "content": "hi"}]}
        asked = {"model": "m", **ASKED, **(prompt if self.path == CHATS else {"prompt": "hi"})}
        return json.dumps({**asked, **fields}).encode()

    async def ask(self, **fields: Any) -> Reply:
        self.prefill.answered.clear()
        return await self.world.ask("POST", self.path, self.body(**fields))

    async def start(self, **fields: Any) -> "Listener":
        self.prefill.answered.clear()
        client = await self.world.connect()
        client.send("POST", self.path, self.body(**fields))
        return Listener(client)

    async def begin(self) -> "Listener":
        """Starts a stream, and reads P's token; D waits for `decode.go`."""
        self.decode.go.clear()
        listener = await self.start()
        await listener.until(b'"The"')
        return listener

    async def sent(self) -> float:
        return await self.world.metric("vllm_disagg_first_tokens_total", 'outcome="sent"')

    async def different(self) -> float:
        return await self.world.metric("vllm_disagg_first_tokens_total", 'outcome="different"')

    async def agree(self) -> None:
        """Sends streams until one begins with P's token."""
        for _ in range(50):
            assert (await self.ask()).body == self.decode.said
            if await self.sent():
                return
        raise AssertionError("P's token was never sent")


class Listener:
    """Reads an answer while it comes."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.reply = Reply()
        self._parser = httptools.HttpResponseParser(self.reply)

    async def until(self, text: bytes) -> None:
        """Reads until the answer's body has these bytes."""
        async with asyncio.timeout(30):
            while text not in self.reply.body:
                self._parser.feed_data(await self._read())
        self.reply.status = self._parser.get_status_code()

    async def end(self) -> Reply:
        async with asyncio.timeout(30):
            while not self.reply.complete:
                self._parser.feed_data(await self._read())
        self.reply.status = self._parser.get_status_code()
        return self.reply

    async def _read(self) -> bytes:
        data = await self.client.reader.read(65536)
        assert data, self.reply.body
        return data


def chats(it: World) -> None:
    for engine in it.prefills + it.decodes:
        engine.plain_chat = True


@pytest.mark.parametrize("path", [COMPLETION, CHATS])
async def test_the_token_of_p_comes_before_d_has_made_its_own(path: str) -> None:
    async with world(first_token="prefill", prepare=chats) as w:
        pair = Pair(w, path)
        await pair.agree()
        pair.decode.go.clear()
        listener = await pair.start(stream_options={"include_usage": True})
        await listener.until(b'"The"')
        opening = listener.reply.body
        assert b"quick" not in opening and opening.endswith(b"\n\n")
        pair.decode.go.set()
        reply = await listener.end()
        assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert reply.body == pair.decode.said and reply.body.startswith(opening)
        assert await pair.different() == 0


async def test_the_client_has_one_identity() -> None:
    """D began its answer in another second than P."""
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        pair.decode.created = 8
        reply = await pair.ask()
        assert b'"created":8' in pair.decode.said
        assert reply.body == pair.decode.said.replace(b'"created":8', b'"created":7')


async def test_tokens_of_d_that_come_together_are_cut_behind_the_first() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        pair.decode.words = ["The quick brown", " fox"]
        reply = await pair.ask()
        texts = [e["choices"][0]["text"] for e in reply.events()[:-1]]
        assert texts == ["The", " quick brown", " fox"]


async def test_an_answer_of_one_token_ends_as_ds() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        pair.decode.words = ["The"]
        choices = [e["choices"][0] for e in (await pair.ask()).events()[:-1]]
        assert [c["text"] for c in choices] == ["The", ""]
        assert [c["finish_reason"] for c in choices] == [None, "length"]


async def test_a_pairs_first_stream_is_ds_alone() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        pair.decode.go.clear()
        listener = await pair.start()
        await pair.prefill.answered.wait()
        await until(lambda: _prefills_ended(w))
        assert await pair.sent() == 0
        pair.decode.go.set()
        assert (await listener.end()).body == pair.decode.said


async def _prefills_ended(w: World) -> bool:
    return await w.metric("vllm_disagg_prefill_leg_seconds_count") > 0


async def test_another_first_token_ends_the_stream_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_token, "AGREEMENTS_AFTER_DIFFERENCE", 2)
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        pair.decode.words = ["A", " quick"]
        with caplog.at_level(logging.WARNING):
            reply = await pair.ask()
        first, error, done = reply.events()
        assert reply.status == 200 and reply.complete
        assert first["choices"][0]["text"] == "The" and done == "[DONE]"
        assert ERROR in error["error"]["message"]
        assert b'"A"' not in reply.body and b"quick" not in reply.body
        assert await pair.different() == 1
        assert w.p.url in caplog.text and w.d.url in caplog.text and "first token" in caplog.text
        # Not sent again until two streams in a row agreed.
        before = await pair.sent()
        for words in (
            WORDS,
            ["A", "b"],
            WORDS,
            WORDS,
        ):  # the second one differs, unseen by the client
            pair.decode.words = words
            assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == before
        assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == before + 1


@pytest.mark.parametrize("words", [[""], ["T"], ["Th", "A"]], ids=["ended", "shorter", "in_two"])
async def test_an_answer_that_ends_within_the_first_token_is_different(words: list[str]) -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        pair.decode.words = words
        reply = await pair.ask()
        assert [e for e in reply.events() if "error" in e] and reply.events()[-1] == "[DONE]"
        assert reply.body.count(b'"text"') == 1
        assert await pair.different() == 1


async def test_a_pair_that_differs_from_the_beginning_never_reaches_a_client() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        pair.prefill.text = "A"
        for _ in range(5):
            assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == await pair.different() == 0


async def test_p_may_die_behind_its_token() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        listener = await pair.begin()
        await w.p.stop()
        pair.decode.go.set()
        assert (await listener.end()).body == pair.decode.said


async def test_another_d_continues_behind_the_token_of_p() -> None:
    async with world(first_token="prefill", prefill=2, decode=2, policy="round_robin") as w:
        pair = Pair(w)
        for _ in range(6):
            await pair.agree()
            await pair.ask()
        before = await pair.sent()
        listener = await pair.begin()
        failed = pair.decode.last_call
        failed.reset()
        await until(lambda: pair.decode.last_call is not failed)
        assert pair.decode.last_call.engine is not failed.engine
        pair.decode.go.set()
        reply = await listener.end()
        assert reply.body == pair.decode.said
        assert await pair.sent() == before + 1


async def test_the_only_d_dies_behind_the_token_of_p() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        listener = await pair.begin()
        pair.decode.last_call.reset()
        reply = await listener.end()
        first, error, done = reply.events()
        assert reply.complete and first["choices"][0]["text"] == "The" and done == "[DONE]"
        assert error["error"]["code"] == 502
        assert await pair.different() == 0


@pytest.mark.parametrize(
    "last",
    [b'data: {"error":{"message":"EngineCore died","code":500}}', b""],
    ids=["error", "abort"],
)
async def test_d_fails_in_words_behind_the_token_of_p(last: bytes) -> None:
    async with world(first_token="prefill", decode=2) as w:
        pair = Pair(w)
        await pair.agree()

        async def fail(call: Call) -> None:
            pair.decode.instead = None
            await call.stream()
            await pair.prefill.answered.wait()
            await settle()
            aborted = {"index": 0, "text": "", "logprobs": None, "finish_reason": "abort"}
            await call.chunk((last or event(call, 7, aborted)) + b"\n\n")
            await call.end()

        pair.decode.instead = fail
        listener = await pair.start()
        assert (await listener.end()).body == pair.decode.said


async def test_a_client_that_leaves_behind_the_token_of_p() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        listener = await pair.begin()
        listener.client.close()
        await pair.decode.last_call.gone.wait()

        async def is_idle() -> bool:
            rows = await w.instances()
            return not any(row["in_flight"] for row in rows)

        await until(is_idle)
        pair.decode.go.set()
        assert (await pair.ask()).body == pair.decode.said


async def test_p_that_is_later_than_d() -> None:
    """D has the prompt in its cache: its first token is the first."""
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        before = await pair.sent()
        pair.prefill.go.clear()
        pair.decode.pause_after = 2
        listener = await pair.start()
        await listener.until(b" quick")
        pair.prefill.go.set()
        assert (await listener.end()).body == pair.decode.said
        assert await pair.sent() == before


async def test_ds_refusal_is_awaited() -> None:
    """The token of P waits for D's status."""
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        before = await pair.sent()

        async def refuse(call: Call) -> None:
            await call.json({"error": {"message": "too long"}}, 400)

        pair.decode.instead = refuse
        pair.decode.accept.clear()
        listener = await pair.start()
        await pair.prefill.answered.wait()
        await settle()
        pair.decode.accept.set()
        reply = await listener.end()
        assert reply.status == 400 and await pair.sent() == before
        pair.decode.instead = None
        pair.decode.go.clear()
        pair.decode.accept.clear()
        listener = await pair.start()
        await pair.prefill.answered.wait()
        pair.decode.accept.set()
        await listener.until(b'"The"')
        pair.decode.go.set()
        assert (await listener.end()).body == pair.decode.said


async def test_the_token_of_a_restarted_p_is_not_sent() -> None:
    async with world(first_token="prefill", probe_interval=30.0) as w:
        pair = Pair(w)
        await pair.agree()
        before = await pair.sent()
        w.p.incarnation = "another"
        assert (await pair.ask()).body == pair.decode.said  # of D alone
        assert await pair.sent() == before


@pytest.mark.parametrize("fields", [{"temperature": 0.5}, {"stop": "x"}, {"n": 2}])
async def test_other_requests_begin_with_ds_token(fields: dict[str, Any]) -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        before = await pair.sent()
        for _ in range(3):
            assert (await pair.ask(**fields)).body == pair.decode.said
        assert await pair.sent() == before


@pytest.mark.parametrize(
    ("mode", "invariant", "is_sent"),
    [("auto", "0", False), ("auto", "1", True), ("decode", "1", False), ("prefill", "0", True)],
)
async def test_the_mode(mode: str, invariant: str, is_sent: bool) -> None:
    def prepare(it: World) -> None:
        for engine in it.prefills + it.decodes:
            engine.layout["VLLM_BATCH_INVARIANT"] = invariant

    async with world(first_token=mode, prepare=prepare) as w:
        pair = Pair(w)
        if is_sent:
            await pair.agree()
        else:
            for _ in range(4):
                assert (await pair.ask()).body == pair.decode.said
            assert await pair.sent() == 0


@pytest.mark.parametrize("parser", ["p", "d"])
async def test_chats_of_an_engine_that_parses_reasoning(parser: str) -> None:
    def prepare(it: World) -> None:
        chats(it)
        (it.p if parser == "p" else it.d).plain_chat = False

    async with world(first_token="prefill", prepare=prepare) as w:
        pair = Pair(w, CHATS)
        for _ in range(4):
            assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == 0
        await Pair(w).agree()  # completions are not parsed


async def test_an_engine_that_leaves_out_the_last_token_has_no_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By chance the tokens may agree; an engine of an older version does not say what it does."""

    def prepare(it: World) -> None:
        it.p.computes_last_token = it.d.computes_last_token = False

    async with world(first_token="prefill", prepare=prepare) as w:
        pair = Pair(w)
        for _ in range(4):
            assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == 0
        [line] = [line for line in caplog.messages if "--first-token prefill has no effect" in line]
        assert w.p.url in line, "D computes no prompts for others"
        assert [row["computes_last_token"] for row in await w.instances()] == [False, False]


@pytest.mark.parametrize(("mode", "computes"), [("auto", False), ("prefill", True)])
async def test_engines_of_which_no_first_token_is_missed_are_not_logged(
    caplog: pytest.LogCaptureFixture, mode: str, *, computes: bool
) -> None:
    def prepare(it: World) -> None:
        it.p.computes_last_token = computes

    async with world(first_token=mode, prepare=prepare) as w:
        assert "--first-token" not in caplog.text
        assert [row["computes_last_token"] for row in await w.instances()] == [computes, True]


async def test_an_engine_of_both_roles_may_miss_the_first_token_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def prepare(it: World) -> None:
        it.d.role, it.d.computes_last_token = "both", False

    async with world(first_token="prefill", prepare=prepare) as w:
        assert f"instance {w.d.url} computes prompts without their last token" in caplog.text


async def test_a_token_at_which_the_answer_ends_is_left_to_d() -> None:
    async with world(first_token="prefill") as w:
        pair = Pair(w)
        await pair.agree()
        before = await pair.sent()
        pair.prefill.finish = "stop"
        assert (await pair.ask()).body == pair.decode.said
        pair.prefill.finish, pair.prefill.text = "length", ""  # half a character
        assert (await pair.ask()).body == pair.decode.said
        assert await pair.sent() == before


COMMON: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "seed": 3},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        {"stream_options": None},
        {"top_p": 0.5, "top_k": 3, "repetition_penalty": 1.2, "logit_bias": {"5": 3}},
        {"stop": None, "stop_token_ids": [7], "logprobs": None, "bad_words": ["x"]},
        {"stop": [], "tools": None, "echo": False, "unknown": None},
    ],
)
@pytest.mark.parametrize("schema", [COMPLETIONS, CHAT])
def test_bodies_that_begin_with_the_token_of_p(schema: Any, fields: dict[str, Any]) -> None:
    body = {**COMMON, schema.prompt: [{"role": "user", "content": "x"}], **fields}
    assert parse(json.dumps(body).encode(), schema).begins_with_prefill_token


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"stream": None},
        {"temperature": 0.1},
        {"temperature": None},
        {"temperature": None, "seed": 3},
        {"temperature": "0"},
        {"stop": "x"},
        {"stop": ["x"]},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"return_token_ids": True},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"include_reasoning": False},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_prompt_text": True},
        {"vllm_xargs": {"a": 1}},
        {"unknown": 0},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True, "unknown": 1}},
        {"stream_options": 5},
        {"stream_options": {"include_usage": True, "unknown": "x" * 2000}},
    ],
)
@pytest.mark.parametrize("schema", [COMPLETIONS, CHAT])
def test_bodies_that_begin_with_the_token_of_d(schema: Any, fields: dict[str, Any]) -> None:
    body = {**COMMON, schema.prompt: "x", **fields}
    body = {name: value for name, value in body.items() if value is not None}
    assert not parse(json.dumps(body).encode(), schema).begins_with_prefill_token


def test_logprobs_that_are_false() -> None:
    """A flag of chats; completions have a count, and read `false` as 0: logprobs without others."""
    for schema, begins in ((CHAT, True), (COMPLETIONS, False)):
        body = {**COMMON, schema.prompt: "x", "logprobs": False}
        assert parse(json.dumps(body).encode(), schema).begins_with_prefill_token is begins


def test_other_endpoints_begin_with_the_token_of_d() -> None:
    body = {"model": "m", "stream": True, "temperature": 0, "input": "x", "store": False}
    assert not parse(json.dumps(body).encode(), RESPONSES).begins_with_prefill_token


def prefill_answer(**fields: Any) -> bytes:
    choice = {"index": 0, "text": "The", "finish_reason": "length", "logprobs": None}
    whole: dict[str, Any] = {"id": "cmpl-1", "created": 7, "choices": [{**choice, **fields}]}
    return json.dumps(whole).encode()


def test_the_token_of_a_prefill_leg() -> None:
    found = FirstToken("cmpl-1", 7, "The")
    assert first_token_in(prefill_answer()) == found
    assert first_token_in(prefill_answer(text=None, message={"content": "The"})) == found
    assert first_token_in(prefill_answer().replace(b"cmpl-1", b'cm\\"')) is None
    assert first_token_in(prefill_answer().replace(b": 7", b": -7")) is None
    assert first_token_in(b"{}") is None
    assert first_token_in(b"\xff") is None
    assert first_token_in(b'{"id":"a","created":1,"choices":[]}') is None


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": None},
        {"finish_reason": "stop"},
        {"finish_reason": None},
        {"message": {"content": None}},
        {"message": {"content": "a", "reasoning": "b"}},
        {"message": {"content": "a", "reasoning_content": "b"}},
        {"message": {"content": "a", "tool_calls": [{}]}},
    ],
)
def test_tokens_that_are_left_to_d(fields: dict[str, Any]) -> None:
    assert first_token_in(prefill_answer(**fields)) is None


def chunk(choice: dict[str, Any], **more: Any) -> bytes:
    fields = {"id": "a", "object": "o", "created": 5, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


ROLE = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}


@pytest.mark.parametrize("text", ["a", '"', "\n", "\\", "é🦊", "m", "stop", " "])
@pytest.mark.parametrize("form", ["text", "delta"])
def test_the_form_of_an_opening(form: str, text: str) -> None:
    """Read from one text, filled with another: the events are those that D makes of it."""

    def opening(text: str) -> bytes:
        lead = b": ping\n\n" + chunk(ROLE) + b"\n\n" if form == "delta" else b""
        piece: dict[str, Any] = {"delta": {"content": text}} if form == "delta" else {"text": text}
        choice = {"index": 0, **piece, "logprobs": None, "stop_reason": None, "later": None}
        return lead + chunk(choice) + b"\n\n" + chunk(choice) + b"\n\ndata: {"

    found = read_opening(opening(text))
    if found is None:  # the text stands elsewhere too: another stream will show the form
        assert text == "m"
        return
    assert found.text == text
    filled = found.form.fill(FirstToken("b", 6, ' x"\n🦊'))
    as_d = opening(' x"\n🦊').removeprefix(b": ping\n\n").split(b"\n\n")
    count = 2 if form == "delta" else 1
    expected = b"".join(raw + b"\n\n" for raw in as_d[:count])
    assert filled == expected.replace(b'"id":"a"', b'"id":"b"').replace(b'd":5', b'd":6')


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b": ping\n\n",
        chunk(ROLE),
        chunk({"index": 0, "text": ""}),
        chunk({"index": 1, "text": "a"}),
        chunk({"index": 0, "text": "a", "finish_reason": "stop"}),
        chunk({"index": 0, "text": "a", "token_ids": [1]}),
        chunk({"index": 0, "text": "a", "logprobs": {}}),
        chunk({"index": 0, "text": "a"}, usage={"prompt_tokens": 3}),
        chunk({"index": 0, "text": "a"}, prompt_token_ids=[1]),
        # A value, or a field, that a continuation does not know.
        chunk({"index": False, "text": "a"}),
        chunk({"index": 0, "text": "a", "unknown": False}),
        chunk({"index": 0, "delta": {"content": "a", "unknown": 0}}),
        chunk({**ROLE, "unknown": ""}) + b"\n\n" + chunk({"index": 0, "delta": {"content": "a"}}),
        chunk({"index": 0, "delta": {"reasoning": "a"}}),
        chunk({"index": 0, "delta": {"content": "a", "reasoning": "b"}}),
        chunk({"index": 0, "delta": {"role": "assistant", "content": "a"}}),
        chunk({"index": 0, "delta": {"tool_calls": []}}),
        chunk({"index": 0, "delta": {}}),
        chunk({"index": 0, "delta": []}),
        chunk({"index": 0, "delta": {"content": ["a"]}}),
        chunk({"index": 0, "delta": {"role": ["a"], "content": ""}}),
        chunk({"index": 0, "text": ["a"]}),
        chunk(None),  # type: ignore[arg-type]
        chunk({"index": 0, "text": "a"}, choices=5),
        chunk({"index": 0, "text": "a"}, object=5),
        b'data: {"error":{"message":"x"}}',
        b'event: x\ndata: {"id":"a"}',
        b"data: [DONE]",
        b'data: {"id":"a","object":"o","created":1,\xff}',
    ],
)
def test_openings_that_show_no_form(beginning: bytes) -> None:
    assert read_opening(beginning + b"\n\n") is None


def known_pairs(monkeypatch: pytest.MonkeyPatch, most: int) -> tuple[Any, Any]:
    """Returns the pairs' memory, and a function that asks it for a relay."""
    monkeypatch.setattr(first_token, "MAX_KNOWN_PAIRS", most)
    tokens = first_token.FirstTokens("prefill", lambda _: None)

    def relay(name: str, model: str = "m") -> Any:
        body = parse(json.dumps({**COMMON, "model": model, "prompt": "x"}).encode())
        engine = SimpleNamespace(
            incarnation=name, layout={}, plain_chat=True, computes_last_token=True
        )
        instance = SimpleNamespace(engine=engine, url=name, models=frozenset(("m", "adapter")))
        pair: Any = SimpleNamespace(prefill=instance, decode=instance)
        return tokens.relay(pair, COMPLETION, body, lambda _, __: True)

    return tokens, relay


def test_forgotten_pairs_agree_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, relay = known_pairs(monkeypatch, 2)
    first = relay("a")
    second = relay("b")
    assert relay("a")._pair is first._pair
    relay("c")  # "b" served longest ago
    assert len(tokens._known) == 2
    assert relay("a")._pair is first._pair
    assert relay("b")._pair is not second._pair


def test_invented_models_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, relay = known_pairs(monkeypatch, 9)
    assert relay("a", "") and relay("a", "m") and relay("a", "adapter")
    assert relay("a", "x" * 1000) is None
    assert len(tokens._known) == 3


def test_each_pair_of_a_large_fleet_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that is forgotten before it serves again sends no first token, ever."""
    tokens, _ = known_pairs(monkeypatch, first_token.MAX_KNOWN_PAIRS)
    body = parse(json.dumps({**COMMON, "model": "m", "prompt": "x"}).encode())

    def instance(name: str) -> Any:
        engine = SimpleNamespace(
            incarnation=name, layout={}, plain_chat=True, computes_last_token=True
        )
        return SimpleNamespace(engine=engine, url=name, models=frozenset("m"))

    pairs: list[Any] = [
        SimpleNamespace(prefill=instance(f"p{p}"), decode=instance(f"d{d}"))
        for p in range(40)
        for d in range(60)
    ]

    def ask() -> list[Any]:
        return [
            relay._pair
            for pair in pairs
            for path in (COMPLETION, CHATS)
            if (relay := tokens.relay(pair, path, body, lambda _, __: True))
        ]

    first = ask()
    assert len(first) == 2 * 40 * 60
    assert all(again is before for again, before in zip(ask(), first, strict=True))
