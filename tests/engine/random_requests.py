"""Makes requests with random fields for each generating endpoint, by seed.

Each request has a right answer: it is greedy, or its tokens are drawn with a seed. Most fields are
valid; in one request of eight one field has a value that vLLM may refuse, in its own words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asking import english, tokens

Body = dict[str, Any]
Value = Callable[[random.Random], Any]
LONGEST_PROMPT = 1500  # tokens; of a prompt that leaves room for an answer
# On CPUs vLLM 0.32 ends by a prompt with a seed that it computes in chunks (test_exact.test_seeds).
LONGEST_DRAWN_PROMPT = 60  # tokens
HOSTILE_SHARE = 1 / 8
DRAWN_SHARE = 1 / 5
FIELD_COUNTS = (0, 1, 2, 3, 5, 9)
UNTRUE: tuple[Any, ...] = (None, "", "x", -1, 0, 1.5, 2**63, True, False, [], {}, [None], ["a", 1])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Looks something up.", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def one_of(*values: Any) -> Value:
    return lambda source: source.choice(values)


def number(low: float, high: float) -> Value:
    return lambda source: round(source.uniform(low, high), 3)


def whole(low: int, high: int) -> Value:
    return lambda source: source.randint(low, high)


def ids(count: int) -> Value:
    return lambda source: [source.randrange(10, 1000) for _ in range(count)]


# Fields that vLLM refuses without another one.
NEEDED = {
    "logprob_token_ids": "logprobs",
    "top_logprobs": "logprobs",
    "tool_choice": "tools",
    "stream_options": "stream",
    "stream_interval": "stream",
}


SAMPLING: Mapping[str, Value] = {
    "top_p": number(0.1, 1.0),
    "top_k": one_of(-1, 0, 1, 5, 50),
    "min_p": number(0.0, 0.5),
    "seed": one_of(0, 7),
    "frequency_penalty": number(-1.5, 1.5),
    "presence_penalty": number(-1.5, 1.5),
    "repetition_penalty": number(0.7, 1.6),
    "logit_bias": lambda source: {str(source.randrange(10, 1000)): source.uniform(-9, 9)},
    "allowed_token_ids": ids(40),
    "bad_words": one_of(["the"], [" a", "e"], []),
    "stop": one_of("e", ["a", "th"], " ", ["never there"], []),
    "stop_token_ids": ids(30),
    "include_stop_str_in_output": one_of(True, False),
    "ignore_eos": one_of(True, False),
    "min_tokens": whole(0, 30),
    "skip_special_tokens": one_of(True, False),
    "spaces_between_special_tokens": one_of(True, False),
    "n": one_of(1, 2, 3),
    "repetition_detection": one_of(
        {"max_pattern_size": 4, "min_count": 2}, {"max_pattern_size": 8, "min_count": 3}
    ),
    "vllm_xargs": one_of({"a": 1}, {"b": "x"}),
}
REQUEST: Mapping[str, Value] = {
    "truncate_prompt_tokens": one_of(-1, 1, 16, 129, 500),
    "truncation_side": one_of("left", "right"),
    "add_special_tokens": one_of(True, False),
    "length_penalty": number(0.5, 1.5),
    "use_beam_search": one_of(True, False, False, False),
    "priority": one_of(0, 0, 3),
    "user": one_of("me", ""),
    "session_id": one_of("s1", "s2"),
    "cache_salt": one_of("salt one", "salt two"),
    "return_token_ids": one_of(True, False),
    "return_tokens_as_token_ids": one_of(True, False),
    "prompt_logprobs": one_of(0, 1, 3, None),
    "logprob_token_ids": ids(3),
    "structured_outputs": one_of(
        {"choice": ["yes", "no", "perhaps"]},
        {"regex": "[a-z]{3,20}"},
        {"json": SCHEMA},
        {"grammar": 'root ::= "a" | "b" root'},
    ),
    "response_format": one_of(
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}},
    ),
}
STREAM: Mapping[str, Value] = {
    "stream": one_of(True, True, False),
    "stream_options": one_of(
        {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, None
    ),
    "stream_interval": whole(1, 5),
}
COMPLETION: Mapping[str, Value] = {
    **SAMPLING,
    **REQUEST,
    **STREAM,
    "echo": one_of(True, False, False),
    "logprobs": one_of(0, 1, 5),
}
CHAT: Mapping[str, Value] = {
    **SAMPLING,
    **REQUEST,
    **STREAM,
    "logprobs": one_of(True, False),
    "top_logprobs": one_of(0, 1, 5),
    "max_completion_tokens": whole(1, 40),
    "tools": one_of([{"type": "function", "function": TOOL}]),
    "tool_choice": one_of(
        "none", "auto", "required", {"type": "function", "function": {"name": "look"}}
    ),
    "parallel_tool_calls": one_of(True, False),
    "include_reasoning": one_of(True, False),
    "reasoning_effort": one_of("low", "high", "none"),
    "echo": one_of(True, False, False),
    "add_generation_prompt": one_of(True, False),
    "continue_final_message": one_of(True, False),
    "documents": one_of([{"title": "t", "text": "x"}]),
    "chat_template_kwargs": one_of({"enable_thinking": False}, {}),
    "return_prompt_text": one_of(True, False),
}
RESPONSES: Mapping[str, Value] = {
    **{
        name: value
        for name, value in SAMPLING.items()
        if name not in ("n", "min_tokens", "allowed_token_ids", "bad_words", "min_p")
    },
    "stream": one_of(True, False),
    "instructions": one_of("Be brief.", ""),
    "max_tool_calls": whole(1, 3),
    "metadata": one_of({"a": "b"}),
    "reasoning": one_of({"effort": "low"}),
    "store": one_of(True, False),
    "text": one_of(
        {"format": {"type": "text"}},
        {"format": {"type": "json_schema", "name": "one", "schema": SCHEMA}},
    ),
    "tools": one_of([{"type": "function", **TOOL}]),
    "tool_choice": one_of("none", "auto", "required"),
    "top_logprobs": one_of(0, 2),
    "include": one_of(["message.output_text.logprobs"]),
    "truncation": one_of("auto", "disabled"),
    "cache_salt": one_of("salt one", "salt two"),
    "structured_outputs": REQUEST["structured_outputs"],
    "include_reasoning": one_of(True, False),
    "service_tier": one_of("auto", "default"),
}
MESSAGES: Mapping[str, Value] = {
    **{name: SAMPLING[name] for name in ("top_p", "top_k", "vllm_xargs")},
    "stream": one_of(True, False),
    "stop_sequences": one_of(["e"], ["never there"]),
    "system": one_of("Be brief.", [{"type": "text", "text": "Be brief."}]),
    "tools": one_of([{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]),
    "tool_choice": one_of(
        {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "look"}
    ),
    "metadata": one_of({"user_id": "me"}),
    "thinking": one_of({"type": "disabled"}, {"type": "adaptive"}),
    "output_config": one_of({"effort": "low"}),
    "cache_salt": one_of("salt one", "salt two"),
    "chat_template_kwargs": one_of({"enable_thinking": False}, {}),
}
TOKENS: Mapping[str, Value] = {
    **STREAM,
    "cache_salt": one_of("salt one", "salt two"),
    "priority": one_of(0, 0, 3),
}
NESTED: Mapping[str, Value] = {
    **SAMPLING,
    "logprobs": one_of(0, 1, 5),
    "prompt_logprobs": whole(0, 3),
}


@dataclass(frozen=True)
class RandomRequest:
    """A request and how it may be sent."""

    path: str
    body: Body
    # No other one may run beside it. One with a seed would have its prompt cut in chunks. With
    # `logprob_token_ids` vLLM 0.32 returns those tokens' logprobs for the whole batch.
    is_alone: bool


class RequestMaker:
    """Makes the request of one seed."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(f"request {seed}")
        self._is_drawn = self._source.random() < DRAWN_SHARE
        # Many prompts begin as others do, so that caches of prefixes have parts of them.
        self._text_seed = self._source.choice((seed, "shared 1", "shared 2"))
        self._longest = LONGEST_DRAWN_PROMPT if self._is_drawn else LONGEST_PROMPT

    def make(self) -> RandomRequest:
        """Returns the request."""
        paths = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/v1/responses": self._response,
            "/v1/messages": self._message,
            "/inference/v1/generate": self._token_ids,
        }
        weights = (3, 3, 2, 0 if self._is_drawn else 1, 1)  # a message has no seed
        (path,) = self._source.choices(list(paths), weights)
        body = paths[path]()
        is_alone = self._is_drawn or "logprob_token_ids" in body
        return RandomRequest(path, body, is_alone)

    def _completion(self) -> Body:
        prompt = self._prompt("a")
        if not self._is_drawn and self._source.random() < 0.1:
            prompt = [prompt, self._prompt("b")]
        return self._filled({"prompt": prompt}, COMPLETION, "max_tokens")

    def _chat(self) -> Body:
        return self._filled({"messages": self._conversation()}, CHAT, "max_tokens")

    def _response(self) -> Body:
        said = [*self._conversation(), {"role": "user", "content": "And then?"}]
        given = [one for one in said if one["role"] != "tool" and one["content"]]
        chosen = self._source.choice([self._text(), given])
        return self._filled({"input": chosen}, RESPONSES, "max_output_tokens")

    def _message(self) -> Body:
        said = [one for one in self._conversation() if one["role"] in ("user", "assistant")]
        plain = [{"role": one["role"], "content": one["content"] or "x"} for one in said]
        return self._filled({"messages": plain}, MESSAGES, "max_tokens")

    def _token_ids(self) -> Body:
        sampling = self._filled({}, NESTED, "max_tokens")
        del sampling["model"]
        body = {
            "token_ids": tokens(self._length(), f"{self._text_seed} a"),
            "sampling_params": sampling,
        }
        filled = self._filled(body, TOKENS, "")
        del filled["temperature"]
        return filled

    def _filled(self, body: Body, fields: Mapping[str, Value], limit: str) -> Body:
        """Returns the body with some of the fields, and with what makes its answer repeatable."""
        source = self._source
        body["model"] = "tiny"
        if limit:
            body[limit] = source.choice((1, 1, 2, 5, 16, 40))
        for name in source.sample(sorted(fields), min(len(fields), source.choice(FIELD_COUNTS))):
            body[name] = fields[name](source)
        for name, needed in NEEDED.items():
            if body.get(name) and needed in fields and not body.get(needed):
                body[needed] = fields[needed](source) or True
        if "min_tokens" in body:
            body["min_tokens"] = min(body["min_tokens"], body[limit])
        if not self._is_drawn:
            body.pop("n", None)  # of several greedy answers vLLM makes one only
        if source.random() < HOSTILE_SHARE:
            body[source.choice(sorted(fields))] = source.choice(UNTRUE)
        body["temperature"] = 0
        if self._is_drawn:
            body["temperature"] = source.choice((1e-6, 0.7, 1, 1.9))
            body.pop("use_beam_search", None)  # its tokens are drawn without the seed
            body["seed"] = source.choice((0, 1, 12345, -7, 2**40))
        return body

    def _length(self) -> int:
        """Returns a prompt's length, often one at the edge of a block (128) or chunk (256)."""
        near = self._source.choice((1, 128, 256, 384, 512, 1024)) + self._source.randint(-2, 2)
        length = self._source.choice((near, self._source.randint(1, self._longest)))
        return max(1, min(length, self._longest))

    def _text(self) -> str:
        return english(LONGEST_PROMPT * 2, self._text_seed)[
            : self._source.randint(1, self._longest * 2)
        ]

    def _prompt(self, part: str) -> Any:
        if self._source.random() < 0.5:
            return tokens(self._length(), f"{self._text_seed} {part}")
        return self._text()

    def _conversation(self) -> list[Body]:
        said: list[Body] = []
        if self._source.random() < 0.5:
            said.append({"role": "system", "content": "Be brief."})
        said.append({"role": "user", "content": self._text()})
        if self._is_drawn:
            return said
        if self._source.random() < 0.4:
            said.append({"role": "assistant", "content": "Certainly."})
            said.append({"role": "user", "content": "And then?"})
        if self._source.random() < 0.15:
            said.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            said.append({"role": "tool", "tool_call_id": "call_1", "content": "found"})
        return said
