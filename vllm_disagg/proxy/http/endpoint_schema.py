"""Describes the generating endpoints of vLLM 0.32 that take `kv_transfer_params`.

A prefill leg is the client's request with the same prompt, one token and no stream. It leaves out
the fields in `drop`. All other fields are the same, so both legs make the same tokens of the
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

Fields = Mapping[str, msgspec.Raw]

# A prefill leg serves for the prompt's KV only: not for tokens, nor for facts about them.
_NOT_FOR_PREFILL = frozenset(
    {
        "stream",
        "stream_options",
        "stream_interval",
        "min_tokens",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",  # vLLM 0.32 on CPUs also crashes on a seeded prompt that it computes in chunks
    }
)
# Fields beside which D's stream begins with P's first token as plain text. Both legs have them, or
# they do not change the first token. All other fields may: `min_tokens`, stop strings, tools ...
_KEEP_FIRST_TOKEN = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "cache_salt",
        "priority",
        "user",
        "request_id",
        "session_id",
    }
)
# Fields that are off by default; others are on, as `add_generation_prompt`.
_OFF = frozenset(("echo", "return_token_ids", "use_beam_search"))
_UNSET = (b"null", b"false")
_SAMPLE_COUNTS = frozenset(("n", "best_of"))  # fields
_BEAM_SEARCH = "use_beam_search"
# Fields of any endpoint that, when set, ask for several sequences or for more of the prompt than
# its KV.
_WHOLE = frozenset((_BEAM_SEARCH, "echo", "prompt_logprobs", "prompt_embeds"))


class _ToolKind(msgspec.Struct):
    type: str = "function"


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool = False


MAX_STREAM_OPTIONS_BYTES = 1024
_decode_stream_options = msgspec.json.Decoder(_StreamOptions | None).decode

MAX_TOOLS_BYTES = 1024 * 1024  # a longer list is not decoded
_decode_tools = msgspec.json.Decoder(list[_ToolKind]).decode


@dataclass(frozen=True)
class EndpointSchema:
    """Names the fields of one endpoint's request."""

    prompt: str  # the field with the prompt
    # Fields that limit the answer's tokens: the first always counts, the others if they are set.
    caps: tuple[str, ...]
    drop: frozenset[str] = _NOT_FOR_PREFILL  # fields that a prefill leg leaves out
    required: tuple[str, ...] = ()  # fields without which the engine refuses a request
    # Fields whose content precedes the prompt in the model's input.
    before: tuple[str, ...] = ()
    whole: frozenset[str] = _WHOLE  # fields that, when set, require one instance
    nested: str = ""  # the field that holds the sampling parameters; empty: they are at the top
    list_of_texts: bool = False  # one request may have several prompts
    # `kv_transfer_params` of the prefill leg that vLLM's validation requires.
    extra: tuple[str, ...] = ()
    stores: bool = False  # the instance stores answers; it must not store a prefill leg's
    # Whether the answer depends on the engine alone: on no template and no parser of an API server.
    unparsed: bool = False
    # Fields that leave D's first token as P's; empty: not known of this endpoint.
    keep_first_token: frozenset[str] = frozenset()
    off: frozenset[str] = _OFF  # fields whose `false` is as if they were not given

    def begins_with_prefill_token(self, fields: Fields) -> bool:
        """Whether the stream of a greedy request must begin with P's first token as plain text."""
        if bytes(fields.get("stream", b"")) != b"true":
            return False
        for name, value in fields.items():
            given = bytes(memoryview(value)[:8])
            is_default = given in (b"null", b"[]") or (given == b"false" and name in self.off)
            if name not in self.keep_first_token and not is_default:
                return False
        return not _has_usage_in_each_event(fields.get("stream_options"))

    def why_whole(self, fields: Fields, sampling: Fields) -> str:
        """Returns the field that requires aggregated service; empty if the work can be split."""
        for values in (fields, sampling):
            for name in self.whole.intersection(values):
                value = bytes(values[name])
                # vLLM reads `false` as the count 0, which asks for logprobs of the prompt.
                if value not in _UNSET or (value == b"false" and name == "prompt_logprobs"):
                    return name
        if name := self._missing(fields) or _sample_count(sampling):
            return name
        if bytes(sampling.get(self.caps[0], b"")) == b"0":
            return self.caps[0]
        if bytes(fields.get("truncate_prompt_tokens", b"")).startswith(b"-"):
            return "truncate_prompt_tokens"  # some versions of vLLM make it depend on max_tokens
        prompt = _beginning(fields, self.prompt)
        if self.list_of_texts:
            return "" if _is_one_prompt(prompt) else self.prompt
        return self._unsplittable(fields, prompt)

    def uses_beam_search(self, fields: Fields, sampling: Fields) -> bool:
        """Whether the engine searches by beams, each step of which is a request of its own."""
        found = (bytes(values.get(_BEAM_SEARCH, b"null")) for values in (fields, sampling))
        return any(value not in _UNSET for value in found)

    def has_several_choices(self, fields: Fields, sampling: Fields) -> bool:
        """Whether the answer may have several choices, for several samples or prompts."""
        if _sample_count(sampling):
            return True
        if not self.list_of_texts:
            return False
        if _beginning(fields, "prompt_embeds") not in (b"", b"null"):
            return True  # a list of prompts, or one beside `prompt`
        prompt = _beginning(fields, self.prompt)
        return prompt.startswith(b"[") and not _is_one_prompt(prompt)

    def _missing(self, fields: Fields) -> str:
        missing = (name for name in self.required if _beginning(fields, name) in (b"", b"null"))
        return next(missing, "")

    def _unsplittable(self, fields: Fields, prompt: bytes) -> str:
        if self.prompt != "input":
            return "" if prompt.startswith(b"[") else self.prompt
        if bytes(fields.get("truncation", b"null")) not in (b"null", b'"disabled"'):
            return "truncation"  # how much of the prompt is cut depends on the answer's limit
        if "tools" in fields and not _only_functions(bytes(fields["tools"])):
            # The engine calls such tools itself, and computes the prompt again after each call.
            return "tools"
        return "" if prompt.startswith((b'"', b"[")) else self.prompt


def _has_usage_in_each_event(stream_options: msgspec.Raw | None) -> bool:
    if stream_options is None or len(memoryview(stream_options)) > MAX_STREAM_OPTIONS_BYTES:
        return stream_options is not None
    try:
        options = _decode_stream_options(stream_options)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    return options is not None and options.continuous_usage_stats is not False


def _only_functions(tools: bytes) -> bool:
    if tools == b"null":
        return True
    if len(tools) > MAX_TOOLS_BYTES:
        return False
    try:
        return all(tool.type == "function" for tool in _decode_tools(tools))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _sample_count(sampling: Fields) -> str:
    """Returns the field that asks for several samples; empty if none does."""
    for name in _SAMPLE_COUNTS.intersection(sampling):
        if bytes(sampling[name]) not in (b"null", b"1"):
            return name
    return ""


def _beginning(fields: Fields, name: str) -> bytes:
    """Returns the start of a field: it may be large, and its first characters show its form."""
    return bytes(memoryview(fields.get(name, b""))[:64])


def _is_one_prompt(prompt: bytes) -> bool:
    """Returns whether a prompt is one text, or one flat list of token ids."""
    if prompt.startswith(b'"'):
        return True
    return prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit()


_CHAT = (
    "model",
    "cache_salt",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "mm_processor_kwargs",
)

COMPLETIONS = EndpointSchema(
    prompt="prompt",
    caps=("max_tokens",),
    before=("model", "cache_salt"),
    list_of_texts=True,
    unparsed=True,
    keep_first_token=_KEEP_FIRST_TOKEN | {"prompt", "max_tokens"},
)
CHAT = EndpointSchema(
    prompt="messages",
    caps=("max_tokens", "max_completion_tokens"),
    before=_CHAT,
    keep_first_token=_KEEP_FIRST_TOKEN
    | {
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "mm_processor_kwargs",
        "media_io_kwargs",
    },
    off=_OFF | {"logprobs"},  # a flag here, and a count for completions, where `false` is 0
)
RESPONSES = EndpointSchema(
    prompt="input",
    caps=("max_output_tokens",),
    before=(*_CHAT, "instructions", "reasoning"),
    drop=_NOT_FOR_PREFILL | {"include", "max_tool_calls", "request_id"},
    # Stored or looked up at one instance.
    whole=_WHOLE
    | {
        "background",
        "previous_response_id",
        "prompt",
        "conversation",
        "previous_input_messages",
    },
    stores=True,
)
MESSAGES = EndpointSchema(
    prompt="messages",
    caps=("max_tokens",),
    required=("model", "max_tokens"),
    before=(*_CHAT, "system", "thinking"),
    # Without it, vLLM requires a thinking budget below the one token of the prefill leg.
    extra=("do_remote_decode",),
)
GENERATE = EndpointSchema(
    prompt="token_ids",
    caps=("max_tokens",),
    required=("sampling_params",),
    before=("model", "cache_salt"),
    nested="sampling_params",
    unparsed=True,
    drop=_NOT_FOR_PREFILL | {"prompt_logprobs", "flat_logprobs", "output_mode", "sampling_mask"},
    whole=_WHOLE | {"features", "content_parts", "prompt_logprob_token_ids"},
)

SCHEMAS: dict[str, EndpointSchema] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": GENERATE,
}
# Paths whose requests vLLM gives to any data parallel rank, and ignores the header.
RANKLESS = ("/v1/responses",)
