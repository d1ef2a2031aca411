"""The generating endpoints of vLLM 0.32 that take `kv_transfer_params`, and what each calls the
things that matter here.

A prefill leg is the client's request with the same prompt, one token, no stream, and without what
it must not be asked for. Everything else stays as it is, so that both legs make the same tokens of
the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

Fields = Mapping[str, msgspec.Raw]

# Only a prompt's KV is wanted of the prefill leg: neither more tokens, nor anything about them.
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
        "seed",  # and vLLM 0.32 on CPUs dies of a seeded prompt that it computes in chunks
    }
)
_UNSET = (b"null", b"false")


class _ToolKind(msgspec.Struct):
    type: str = "function"


MAX_TOOLS_BYTES = 1024 * 1024  # that are looked into
_tools = msgspec.json.Decoder(list[_ToolKind]).decode


@dataclass(frozen=True)
class EndpointSchema:
    """One endpoint's names for things."""

    prompt: str  # the field with the prompt
    caps: tuple[
        str, ...
    ]  # fields that limit the answer's tokens; the first always counts, the others if they are set
    drop: frozenset[str] = _NOT_FOR_PREFILL
    before: tuple[
        str, ...
    ] = ()  # fields whose content comes before the prompt's in what the model reads
    whole: tuple[
        str, ...
        # fields that, when set, ask for more than one sequence or for more of the prompt than KV
    ] = ()
    nested: str = ""  # the field that the sampling parameters are in, if they are not at the top
    list_of_texts: bool = False  # several prompts in one request are possible
    extra: tuple[
        str, ...
    ] = ()  # `kv_transfer_params` of the prefill leg that vLLM's own validation looks for
    stores: bool = False  # answers are kept, and a prefill leg's must not be

    def why_whole(self, fields: Fields, sampling: Fields) -> str:
        """The field because of which one decode instance must serve this alone; empty when the work
        can be split.
        """
        for name in (*_WHOLE, *self.whole):
            for place in (fields, sampling):
                if name in place and bytes(place[name]) not in _UNSET:
                    return name
        for name in ("n", "best_of"):
            if name in sampling and bytes(sampling[name]) not in (b"null", b"1"):
                return name
        if bytes(sampling.get(self.caps[0], b"")) == b"0":
            return self.caps[0]
        if bytes(fields.get("truncate_prompt_tokens", b"")).startswith(b"-"):
            return "truncate_prompt_tokens"  # some versions of vLLM make it depend on max_tokens
        prompt = bytes(
            memoryview(fields.get(self.prompt, b""))[:64]
        )  # a prompt may be large, and its start tells
        if self.list_of_texts:
            return "" if _is_one_prompt(prompt) else self.prompt
        return self._unusual(fields, prompt)

    def _unusual(self, fields: Fields, prompt: bytes) -> str:
        if self.prompt != "input":
            return "" if prompt.startswith(b"[") else self.prompt
        if bytes(fields.get("truncation", b"null")) not in (b"null", b'"disabled"'):
            return "truncation"  # how much of the prompt is cut depends on the answer's limit
        if "tools" in fields and not _only_functions(bytes(fields["tools"])):
            return (
                "tools"  # the engine calls such tools itself, and reads the prompt again after each
            )
        return "" if prompt.startswith((b'"', b"[")) else self.prompt


def _only_functions(tools: bytes) -> bool:
    if tools == b"null":
        return True
    if len(tools) > MAX_TOOLS_BYTES:
        return False
    try:
        return all(tool.type == "function" for tool in _tools(tools))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _is_one_prompt(prompt: bytes) -> bool:
    """A text, or a flat list of token ids."""
    return prompt.startswith(b'"') or (
        prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit()
    )


_WHOLE = ("use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
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
)
CHAT = EndpointSchema(
    prompt="messages",
    caps=("max_tokens", "max_completion_tokens"),
    before=_CHAT,
)
RESPONSES = EndpointSchema(
    prompt="input",
    caps=("max_output_tokens",),
    before=(*_CHAT, "instructions", "reasoning"),
    drop=_NOT_FOR_PREFILL | {"include", "max_tool_calls", "request_id"},
    # kept or looked up at one instance
    whole=(
        "background",
        "previous_response_id",
        "prompt",
        "conversation",
        "previous_input_messages",
    ),
    stores=True,
)
MESSAGES = EndpointSchema(
    prompt="messages",
    caps=("max_tokens",),
    before=(*_CHAT, "system", "thinking"),
    extra=(
        "do_remote_decode",
    ),  # else a thinking budget must be less than the one token of the prefill leg
)
GENERATE = EndpointSchema(
    prompt="token_ids",
    caps=("max_tokens",),
    before=("model", "cache_salt"),
    nested="sampling_params",
    drop=_NOT_FOR_PREFILL | {"prompt_logprobs", "flat_logprobs", "output_mode", "sampling_mask"},
    whole=("features", "content_parts", "prompt_logprob_token_ids"),
)

SCHEMAS: dict[str, EndpointSchema] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": GENERATE,
}
RANKLESS = (
    "/v1/responses",
)  # what comes here vLLM gives to any data parallel rank, whatever the header says
